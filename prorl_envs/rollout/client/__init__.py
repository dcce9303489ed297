"""Clients of the rollout service. Begin with `client.py`."""
