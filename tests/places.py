"""Directories for the drivers of a test run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prorl_envs.sandbox.filesystem.directories import base_problem

#: If this variable is set, all directories are on disk. CI runs the sandbox tests both ways.
ON_DISK = "TESTS_ON_DISK"
_MEMORY = Path("/dev/shm")
#: Free bytes required in memory.
_FREE = 4 << 30


def drivers_directory(*, in_memory: bool = False) -> Iterator[Path]:
    """Create the directory, name it in `PRORL_RUN_DIR`, yield it and remove it. This is the body of a
    fixture.

    A driver writes and removes an /etc of hundreds of files: 0.9 s on a slow disk, 0.02 s in memory. Not for
    tests of limits: files in memory count towards a sandbox's memory limit.

    Args:
        in_memory: whether the directory may be in /dev/shm, if there is room.
    """
    base = _MEMORY if in_memory and _has_room(_MEMORY) else None
    # The path is short: it is part of socket paths.
    path = Path(tempfile.mkdtemp(prefix="prt-", dir=base)).resolve()
    before = os.environ.get("PRORL_RUN_DIR")
    os.environ["PRORL_RUN_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["PRORL_RUN_DIR"]
    else:
        os.environ["PRORL_RUN_DIR"] = before
    shutil.rmtree(path)


def _has_room(path: Path) -> bool:
    if os.environ.get(ON_DISK) or base_problem(path):  # in Docker containers it is mounted noexec
        return False
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize >= _FREE
