"""Where builds work: directories on a local disk, removed also when their owner was killed."""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.images.lock import process_started
from prorl_envs.images.supervisor import remove

_NAME = re.compile(r"prorl-image-(\d+)-(\d+)-(\d+)-.*")
#: What Apptainer adds for its own files below, with room for a root file system's paths.
_PATH_LIMIT = 1024


def make_scratch(base: Path) -> Path:
    """A new directory below `base`, for this process; first removes those of processes that are gone.

    Raises:
        SandboxError: it cannot be made.
    """
    pids = _pid_namespace()
    try:
        for path in base.glob("prorl-image-*"):
            if (match := _NAME.fullmatch(path.name)) and path.lstat().st_uid == os.geteuid():
                namespace, pid, started = match.groups()
                if namespace == pids and process_started(int(pid)) != started:
                    with contextlib.suppress(OSError):
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


def _pid_namespace() -> str:
    return re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
