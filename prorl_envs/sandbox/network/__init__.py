"""The allowlist of a sandbox and the proxy that enforces it. Begin with `proxy.py`."""
