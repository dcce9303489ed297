"""System calls, seccomp filters and file descriptors: functions that Python does not provide."""
