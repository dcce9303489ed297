"""Launcher: a program of system calls that creates a sandbox."""
