"""Batches: dynamic sampling over groups."""
