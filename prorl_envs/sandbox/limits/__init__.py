"""Limits of memory, processes, disk and kernel counters, and how they are enforced."""
