"""HTTP listener with bounded connections, for clients that are not authenticated yet."""
