"""Images of sandboxes: sources, builds, pulls and their store. Begin with `builder.py`."""
