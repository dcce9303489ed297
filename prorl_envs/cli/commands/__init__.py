"""One module per command. Begin with `run.py`."""
