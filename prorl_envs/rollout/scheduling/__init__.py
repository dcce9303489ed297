"""Scheduling of jobs on stages and nodes. No I/O. Begin with `scheduler.py`."""
