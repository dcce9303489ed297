"""The rollout service and its parts. Begin with `service.py`."""
