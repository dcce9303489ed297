"""Tools inside a sandbox: shell, Python session, files, processes. Begin with `types.py`."""
