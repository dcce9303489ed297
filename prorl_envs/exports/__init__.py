"""Exports of results: tables, datasets, chat messages, ATIF trajectories. Begin with `formats.py`."""
