"""Composition root: builds nodes, models and the service from the settings. Begin with `compose.py`."""
