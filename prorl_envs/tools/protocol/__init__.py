"""Messages between host and tool server; both import only this. Begin with `messages.py`."""
