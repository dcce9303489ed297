"""The HTTP server: application, authentication, middleware. Begin with `app.py`."""
