"""Data and computation tasks for a Python session."""
