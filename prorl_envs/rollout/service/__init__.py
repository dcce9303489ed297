"""The rollout service and its parts."""
