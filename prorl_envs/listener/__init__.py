"""HTTP listener with bounds for unauthenticated clients. Begin with `listener.py`."""
