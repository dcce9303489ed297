"""One client per kind of model server, and their checks."""
