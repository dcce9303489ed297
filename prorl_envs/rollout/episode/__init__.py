"""One job: the agent loop, its stages and its tokens. Begin with `engine.py`."""
