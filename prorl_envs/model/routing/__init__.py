"""Balance, session affinity and pausing over several model servers. Begin with `pool.py`."""
