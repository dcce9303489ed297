"""One module per group of routes. Begin with `results.py`."""
