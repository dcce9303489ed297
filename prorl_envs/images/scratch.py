"""Scratch directories of builds, on a local disk. Those of killed processes are removed later."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.images.supervisor import remove

_NAME = re.compile(r"prorl-image-(\d+)-(\d+)-(\d+)-.*")
#: Most bytes of the path: Apptainer appends paths of its own files, and those of a root file system.
_PATH_LIMIT = 1024


def make_scratch(base: Path) -> Path:
    """Create a directory below `base` for this process; first remove those of dead processes.

    Raises:
        SandboxError: the directory cannot be created.
    """
    pids = _pid_namespace()
    try:
        for path in base.glob("prorl-image-*"):
            match = _NAME.fullmatch(path.name)
            if match is not None and match[1] == pids and process_started(int(match[2])) != match[3]:
                with contextlib.suppress(OSError):  # of another user, or removed meanwhile
                    if path.lstat().st_uid == os.geteuid():
                        remove(path)
        prefix = f"prorl-image-{pids}-{os.getpid()}-{process_started(os.getpid())}-"
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        for name in ("tmp", "cache"):
            (scratch / name).mkdir()
    except OSError as error:
        raise SandboxError(
            f"cannot make a directory in {base}: {error.strerror}", hint="set run_dir"
        ) from error
    if len(os.fsencode(scratch)) > _PATH_LIMIT or not re.fullmatch(r"[\w./@%+=-]+", str(scratch)):
        remove(scratch)
        raise SandboxError(f"images cannot be built below {base}", hint="set run_dir to a short, plain path")
    return scratch


def process_started(pid: int) -> str:
    """Return a process's start time in clock ticks after the host's boot; empty if it is dead or absent."""
    try:
        # The name in the second field may contain any characters, including brackets and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _pid_namespace() -> str:
    return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
