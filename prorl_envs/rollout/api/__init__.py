"""Types of the HTTP interface. Imports nothing else of `rollout`. Begin with `types.py`."""
