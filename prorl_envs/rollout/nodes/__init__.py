"""Nodes: further machines and processes that run jobs for a service. Knows no transport (`app.ray`)."""
