"""A model endpoint per rollout: OpenAI's and Anthropic's interfaces over the token protocol, recorded."""
