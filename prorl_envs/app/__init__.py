"""Composition root: builds nodes, environments, model clients and the service from the configuration."""
