"""System calls, seccomp filters and file descriptors. Begin with `seccomp.py`."""
