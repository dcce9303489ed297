"""Viewer of rollouts in a browser: the pages, an index of stored results, an offline server, an export."""
