"""View of a sandbox's processes from the host, and secrets planted there for sandboxes to find."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Variable that marks a process started inside, to find it from the host. Its children inherit it.
MARK = "PRORL_CONFORMANCE_MARK"
#: Variable of this process that no process inside may see.
SECRET = "PRORL_CONFORMANCE_SECRET"
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Planted:
    """Secrets planted on the host while the suite runs.

    Args:
        secret: text in this process's environment, in an inheritable descriptor, and in the files below.
        files: files in the temporary directory and, if writable, in the home and working directory.
    """

    secret: str
    files: tuple[Path, ...]


@contextmanager
def planted() -> Iterator[Planted]:
    """Plant a secret in this process and in files, and set unusual signal dispositions; undo all on exit."""
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        files = []
        for folder in dict.fromkeys((tempfile.gettempdir(), "~", str(Path.cwd()))):
            with contextlib.suppress(OSError, RuntimeError):  # the user may have no home
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(
                        "w", dir=Path(folder).expanduser(), prefix=".prorl-conformance-"
                    )
                )
                file.write(secret)
                file.flush()
                files.append(Path(file.name))
        descriptor = os.memfd_create(SECRET, 0)  # without close-on-exec
        stack.callback(os.close, descriptor)
        os.write(descriptor, secret.encode())
        os.environ[SECRET] = secret
        stack.callback(os.environ.pop, SECRET)
        stack.enter_context(_odd_signals())
        yield Planted(secret, tuple(files))


#: Signals to ignore and signals to block, as in a service that was started by `nohup ... &`.
_IGNORED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGRTMIN + 3)
_BLOCKED = (signal.SIGUSR2, signal.SIGALRM, signal.SIGRTMIN + 4)


@contextmanager
def _odd_signals() -> Iterator[None]:
    """Ignore and block signals in this process, as the parent of a service may have done."""
    before = [signal.signal(number, signal.SIG_IGN) for number in _IGNORED]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip(_IGNORED, before, strict=True):
            signal.signal(number, handler)


def marked(mark: str) -> list[int]:
    """Return the pids, on the host, of living processes that carry `mark`."""
    entry = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if entry in _environment(pid) and _lives(pid)]


def showing(name: str) -> list[int]:
    """Return the pids of processes whose command line or mounts contain `name`, a unique directory name."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            process = Path("/proc", str(pid))
            named = name.encode() in (process / "cmdline").read_bytes() and _lives(pid)
            if named or (_has_other_mounts(process) and name.encode() in _mounts(process)):
                found.append(pid)
    return found


@contextmanager
def bystander(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a waiting process on the host, with `words` in its command line."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a program that has just started has no visible command line yet
        yield process


def owner(pid: int) -> int:
    """Return the user id, on the host, that owns this process."""
    return Path(f"/proc/{pid}").stat().st_uid


def shared_namespaces(pid: int) -> list[str]:
    """Return the names of the namespaces that `pid` shares with this process."""
    return [
        name
        for name in NAMESPACES
        if Path(f"/proc/{pid}/ns/{name}").stat().st_ino == Path(f"/proc/self/ns/{name}").stat().st_ino
    ]


def first_process(pid: int) -> int:
    """Return the pid, on the host, of the first process of the pid namespace that `pid` is in."""
    namespace = Path(f"/proc/{pid}/ns/pid").readlink()
    for candidate in _pids():
        with contextlib.suppress(OSError):
            process = Path("/proc", str(candidate))
            if (process / "ns/pid").readlink() == namespace and b"\t1\n" in _pid_line(process):
                return candidate
    raise ProcessLookupError(f"no first process beside {pid}")


async def eventually(condition: Callable[[], bool]) -> bool:
    """Return whether `condition` becomes true within `_PATIENCE_S` seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _has_other_mounts(process: Path) -> bool:
    return (process / "ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()


def _pid_line(process: Path) -> bytes:
    """Return the line with the pids of a process, from this namespace's to its own."""
    return next(
        line for line in (process / "status").read_bytes().splitlines(True) if line.startswith(b"NSpid")
    )


def _mounts(process: Path) -> bytes:
    return (process / "mountinfo").read_bytes()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names alone


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):  # the process has exited, or is another user's
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1] not in ("Z", "X")
    return False
