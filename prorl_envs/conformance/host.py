"""What a sandbox's processes look like from the host, and what is planted there for them to find."""

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Variable by which a process started inside is found again from outside. Whatever it starts inherits it.
MARK = "PRORL_CONFORMANCE_MARK"
#: Variable of this process's own that nothing inside may know.
SECRET = "PRORL_CONFORMANCE_SECRET"
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Planted:
    """What lies about on the host while the suite runs.

    Args:
        secret: in this process's environment, in an inheritable descriptor, and in the files below.
        files: in the temporary directory, and where they can be written the home and working directory.
    """

    secret: str
    files: tuple[Path, ...]


@contextmanager
def planted() -> Iterator[Planted]:
    """Plant a secret in this process and around it; removed on leaving."""
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        files = []
        for folder in dict.fromkeys((Path(tempfile.gettempdir()), Path.home(), Path.cwd())):
            with contextlib.suppress(OSError):
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile("w", dir=folder, prefix=".prorl-conformance-")
                )
                file.write(secret)
                file.flush()
                files.append(Path(file.name))
        descriptor = os.memfd_create(SECRET, 0)  # without close-on-exec
        stack.callback(os.close, descriptor)
        os.write(descriptor, secret.encode())
        os.environ[SECRET] = secret
        stack.callback(os.environ.pop, SECRET)
        yield Planted(secret, tuple(files))


def marked(mark: str) -> list[int]:
    """The pids, on the host, of living processes that carry `mark`."""
    entry = f"{MARK}={mark}".encode()
    return [pid for pid in _pids() if entry in _environment(pid) and _lives(pid)]


def showing(name: str) -> list[int]:
    """The pids of processes whose command or mounts name the directory `name`, a unique one."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            process = Path("/proc", str(pid))
            named = name.encode() in (process / "cmdline").read_bytes() and _lives(pid)
            if named or (_in_another_system(process) and name.encode() in _mounts(process)):
                found.append(pid)
    return found


@contextmanager
def bystander(*words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the host's own, with `words` in its command line, that waits."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # a program that has just begun has no command line to be seen yet
        yield process


def interfaces() -> set[str]:
    """The names of the host's network interfaces that lead somewhere."""
    return {path.name for path in Path("/sys/class/net").iterdir() if (path / "device").exists()}


def owner(pid: int) -> int:
    """The user id, on the host, whose process this is."""
    return Path(f"/proc/{pid}").stat().st_uid


def shared_namespaces(pid: int) -> list[str]:
    """The namespaces that `pid` shares with this process, by name."""
    return [
        name
        for name in NAMESPACES
        if Path(f"/proc/{pid}/ns/{name}").stat().st_ino == Path(f"/proc/self/ns/{name}").stat().st_ino
    ]


async def eventually(condition: Callable[[], bool], *, patience_s: float = _PATIENCE_S) -> bool:
    """Whether `condition` comes to hold within `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _in_another_system(process: Path) -> bool:
    return (process / "ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()


def _mounts(process: Path) -> bytes:
    return (process / "mountinfo").read_bytes()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - names alone


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][:1] not in ("Z", "X")
    return False
