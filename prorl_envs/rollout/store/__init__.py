"""Stores of groups, results and batches."""
