"""The rollout service and its parts. Begin with `build.py`."""
