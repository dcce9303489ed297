"""Limits of memory, processes, disk and kernel counters. Begin with `enforcement.py`."""
