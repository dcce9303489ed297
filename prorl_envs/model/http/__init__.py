"""HTTP client for model servers. Begin with `client.py`."""
