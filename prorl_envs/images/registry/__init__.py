"""Pulls of OCI images from registries, without another program. Begin with `client.py`."""
