"""The HTTP server: application, authentication, middleware."""
