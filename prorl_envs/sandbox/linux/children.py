"""Children of this process. Imports little: templates and supervisors use it."""

import contextlib
import os
import signal


def kill_children() -> None:
    """Kill and reap all children of this process, until it has none.

    In a process that adopts orphans (PR_SET_CHILD_SUBREAPER), this kills all descendants: the children of a
    killed process become children of this one. A child keeps its pid until this process reaps it, so no other
    process is hit.
    """
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:  # noqa: PTH123 - without pathlib
            children = [int(pid) for pid in file.read().split()]
        for pid in children:
            with contextlib.suppress(PermissionError):  # a program with another user's rights
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
