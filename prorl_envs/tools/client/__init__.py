"""Host side of the tools. Begin with `toolbox.py`."""
