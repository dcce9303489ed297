"""Further machines and processes that run jobs for a service: messages, connections, workers."""
