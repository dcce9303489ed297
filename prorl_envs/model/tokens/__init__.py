"""Chat templates, tokenizers and the token context of a rollout."""
