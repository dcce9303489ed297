"""Viewer of rollouts: pages, index, offline server, export. Begin with `episodes.py`."""
