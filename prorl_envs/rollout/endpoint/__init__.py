"""Model endpoint of a rollout: OpenAI's and Anthropic's interfaces. Begin with `app.py`."""
