"""Stores of groups, results and batches. Begin with `sql.py`."""
