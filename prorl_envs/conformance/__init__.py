"""Test suite of the promises that every sandbox driver keeps, for any driver. Begin with `promise.py`."""
