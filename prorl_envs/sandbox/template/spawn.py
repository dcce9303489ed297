"""Start of programs from a template process."""

import os
import signal
from collections.abc import Sequence


def spawn(command: Sequence[str], fds: Sequence[int]) -> int:
    """Start a program without forking this process: creating and destroying the copy would take longer than
    the program's start. The program leads its own session and has no environment.

    Args:
        command: the program's path and arguments, its name first.
        fds: the descriptor for its standard streams, then those for its descriptors 3, 4, and so on.

    Returns:
        The pid of the program, which is a child of this process.

    Raises:
        OSError: the program cannot be run.
    """
    path, *arguments = command
    streams, *others = fds
    # First copy all to high numbers, so that no target overwrites a source.
    high = max(fds) + 1
    sources = [streams] * 3 + others
    return os.posix_spawn(
        path,
        arguments,
        {},
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, fd, high + number) for number, fd in enumerate(sources)),
            *((os.POSIX_SPAWN_DUP2, high + number, number) for number in range(len(sources))),
            *((os.POSIX_SPAWN_CLOSE, high + number) for number in range(len(sources))),
        ],
        setsid=True,
        # Programs inherit ignored and blocked signals, whether from Python or from this process's parent.
        setsigdef=signal.valid_signals(),
        setsigmask=(),
    )
