"""The allowlist of a sandbox and the proxy that enforces it."""
