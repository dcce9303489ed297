"""Tool server, which runs in the sandbox."""
