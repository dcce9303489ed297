"""Run folders and their statistics. Begin with `folder.py`."""
