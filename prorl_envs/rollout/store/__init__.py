"""Stores of groups, results and batches. Begin with `sqlite.py`."""
