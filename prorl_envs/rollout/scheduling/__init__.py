"""Scheduling of jobs on stages and nodes. No I/O."""
