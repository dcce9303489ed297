"""Metrics and the state that the dashboard shows. Begin with `metrics.py`."""
