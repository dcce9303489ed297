"""Engines that run Python cells in a sandbox."""

from enum import StrEnum


class PythonEngine(StrEnum):
    """Engine for Python cells.

    NONE: no Python. FORKED: IPython in a process forked warm from the host's own interpreter. KERNEL: a
    Jupyter kernel of the sandbox's own `python3`, which must have ipykernel.
    """

    NONE = "none"
    FORKED = "forked"
    KERNEL = "kernel"
