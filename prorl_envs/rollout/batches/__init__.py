"""Batches: dynamic sampling over groups. Begin with `dynamic_sampling.py`."""
