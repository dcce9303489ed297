"""Builds of Dockerfiles into layers, in sandboxes, without Docker. Begin with `build.py`."""
