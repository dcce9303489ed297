"""Directories, images and mounts of sandboxes. Begin with `mount_plan.py`."""
