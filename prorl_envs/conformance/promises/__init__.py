"""The promises: one module per theme. Begin with `start.py`."""
