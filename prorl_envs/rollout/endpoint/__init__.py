"""Model endpoint of a rollout: OpenAI's and Anthropic's interfaces over the token protocol, recorded."""
