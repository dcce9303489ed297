"""Clients of model servers, chat templates and tokens. Begin with `types.py`."""
