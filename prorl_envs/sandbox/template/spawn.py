"""Start of programs from a template process."""

import os
import signal
from collections.abc import Sequence


def spawn(command: Sequence[str], fds: Sequence[int]) -> int:
    """Start a program without a copy of this process: creating and destroying a copy would take longer than
    the program's start. The program leads its own session and has no environment.

    Args:
        command: the program's path and arguments, its name first.
        fds: the descriptor for its standard streams, and the descriptors for its next numbers.

    Returns:
        its pid, a child of this process.

    Raises:
        OSError: it cannot be run.
    """
    path, *arguments = command
    streams, *others = fds
    # Through high numbers, so that no target overwrites a source.
    high = max(fds) + 1
    sources = [streams] * 3 + others
    return os.posix_spawn(
        path,
        arguments,
        {},
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, fd, high + place) for place, fd in enumerate(sources)),
            *((os.POSIX_SPAWN_DUP2, high + place, place) for place in range(len(sources))),
            *((os.POSIX_SPAWN_CLOSE, high + place) for place in range(len(sources))),
        ],
        setsid=True,
        # Programs inherit ignored and blocked signals, whether from Python or from this process's parent.
        setsigdef=signal.valid_signals(),
        setsigmask=(),
    )
