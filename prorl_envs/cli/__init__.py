"""The command line. Data goes to stdout, everything else to stderr. Begin with `main.py`."""
