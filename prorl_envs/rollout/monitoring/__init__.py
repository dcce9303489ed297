"""Metrics and the state that the dashboard shows."""
