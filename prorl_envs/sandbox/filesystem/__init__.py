"""Directories, images and mounts of sandboxes."""
