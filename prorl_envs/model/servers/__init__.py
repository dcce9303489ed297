"""One client per kind of model server, and their checks. Begin with `base.py`."""
