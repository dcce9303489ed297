"""Directories, images, mounts and snapshots of sandboxes."""
