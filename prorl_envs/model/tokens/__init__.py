"""Chat templates, tokenizers and the tokens of a rollout. Begin with `rendering.py`."""
