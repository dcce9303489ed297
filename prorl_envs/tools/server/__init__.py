"""Tool server, which runs in the sandbox. Begin with `server.py`."""
