"""The drivers, one module each, and the probes that check whether they work here. Begin with `base.py`."""
