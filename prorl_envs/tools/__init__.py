"""Tools that run inside a sandbox: a persistent shell, a Python session, files, and fresh processes."""
