"""Checkpoint of a running sandbox, taken by a child of a template. Independent of the host side.

The child enters the sandbox as its owner, stops all programs and reports what they have open. Then it mounts
an overlay on each of the sandbox's directories, whose lower layer is the directory as it is, and lets the
programs go on. So that directory never changes again, and takes no copying. A program with an open file would
still change it: then the host copies the directories while the programs are stopped, and nothing is mounted.
"""

import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prorl_envs.sandbox.linux.descriptors import opened, pid_of
from prorl_envs.sandbox.linux.kernel_settings import enter_owner
from prorl_envs.sandbox.linux.ptrace import Thread, read_mappings, state, threads
from prorl_envs.sandbox.linux.syscall_wrappers import attach_tree, mount, open_tree, unmount
from prorl_envs.sandbox.template.memory_image import change_directory, restore, save

_MS_NOSUID, _MS_NODEV = 2, 4
_MESSAGE_BYTES = 65536
_NAME_CHARACTERS = 100
_MOST_NAMED, _MOST_CHARACTERS = 20, 300
#: Number of the system call in which an idle Python session waits (recvfrom, x86-64), and the descriptor.
_IDLE = ["45", "0x3"]
_IDLE_TIMEOUT_S = 10.0
#: Standard streams and the control socket of a Python session.
_OWN_FILES = range(4)


@dataclass(slots=True)
class _Stopped:
    """The stopped programs.

    Args:
        threads: the threads of each by its pid inside, the first thread first.
        waiting: threads that wait in the kernel, and will stop when they leave it.
    """

    threads: dict[int, list[Thread]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def add_all(self) -> None:
        """Stop every program but the first, until none is left that runs."""
        own = int(os.readlink("/proc/self"))  # noqa: PTH115 - templates import no pathlib
        while True:
            found = False
            for name in os.listdir("/proc"):  # noqa: PTH208
                if name.isdigit() and int(name) not in (1, own):
                    found |= self._add(int(name))
            if not found:
                return

    def _add(self, pid: int) -> bool:
        added, known = False, self.threads.get(pid, [])
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for tid in set(threads(pid)) - {thread.tid for thread in known} - self.waiting:
                if state(tid) != "Z":
                    added = True
                    thread = Thread.stop(tid)
                    known += [] if thread is None else [thread]
                    self.waiting |= {tid} if thread is None else set()
        if known:
            self.threads[pid] = sorted(known, key=lambda thread: thread.tid)
        return added

    def resume(self) -> None:
        for stopped in self.threads.values():
            for thread in stopped:
                thread.resume()


def checkpoint(first: int, memory: int | None, request: dict[str, Any], host: socket.socket) -> None:
    """Take a checkpoint of a sandbox.

    The host receives `{"bound": [...], "programs": [...]}` while the programs are stopped: what prevents
    mounting, and the programs beside the sessions. It answers `{"mount": bool}`. When the programs run again,
    it receives what the saved memory lacks: `{"lost": [...]}`.

    Args:
        first: pidfd of the sandbox's first process.
        memory: file for the memory of the Python session, if `request["python"]` gives one.
        request: `base` and, relative to it, the `trees`, each with its path inside (`target`), its `lower`
            layers, its `upper` layer and its `work` directory; the pids of the `shells` and of the `python`
            session.
        host: socket to the host.

    Raises:
        OSError: the sandbox has stopped, or the kernel refused.
    """
    sessions = [os.pidfd_open(pid) for pid in (*request["shells"], *filter(None, [request["python"]]))]
    mounts = _prepare_mounts(first, request)

    def inside() -> None:
        pids = [pid_of(fd) for fd in sessions]
        python = pids[-1] if request["python"] else None
        stopped = _Stopped()
        try:
            stopped.add_all()
            targets = _mounted_at([tree["target"] for tree in request["trees"]])
            others = [_name(pid) for pid in stopped.threads if pid not in pids]
            bound = [text[:_MOST_CHARACTERS] for text in _open_files(stopped, targets)]
            _send(host, bound=bound[:_MOST_NAMED], programs=others[:_MOST_NAMED])
            answer = host.recv(_MESSAGE_BYTES)
            if not answer:  # the host has exited
                return
            lost: list[str] = []
            if python is not None and memory is not None:
                save(python, stopped.threads[python][0], memory)
                lost = list(_lost(python, stopped.threads[python]))
            if json.loads(answer)["mount"]:
                entered = [(pid, place) for pid in stopped.threads if (place := _directory(pid, targets))]
                for target, tree in mounts:
                    unmount(target)
                    attach_tree(tree, target)
                for pid, place in entered:
                    with contextlib.suppress(ProcessLookupError):  # it has been killed
                        change_directory(pid, stopped.threads[pid][0], place)
        finally:
            stopped.resume()
        _send(host, lost=lost[:_MOST_NAMED])

    _run_inside(first, inside, host)


def restore_memory(first: int, memory: int, request: dict[str, Any], host: socket.socket) -> None:
    """Give a new Python session the memory of a saved one.

    Args:
        first: pidfd of the sandbox's first process.
        memory: the saved memory, which the session has open as `request["file"]`.
        request: `python` is the pid of the session.

    Raises:
        OSError: the memory cannot be restored; the session must be killed.
    """
    session = os.pidfd_open(request["python"])

    def inside() -> None:
        pid = pid_of(session)
        _await_idle(pid)
        if (thread := Thread.stop(pid)) is None:
            raise OSError("the Python session does not stop")
        restore(pid, thread, memory, request["file"])
        thread.resume()
        _send(host)

    enter_owner(first)
    _run_inside(first, inside, host)


def _prepare_mounts(first: int, request: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Enter the user namespace that owns the sandbox's mounts, and make the overlays, mounted nowhere yet."""
    enter_owner(first)
    os.unshare(os.CLONE_NEWNS)
    # Short relative paths: the options of a mount have at most one page.
    os.chdir(request["base"])
    prepared = []
    for tree in request["trees"]:
        layers = f"lowerdir={':'.join(tree['lower'])},upperdir={tree['upper']},workdir={tree['work']}"
        place = tree["upper"]
        # Without `volatile`, the end of a mount would write out the whole file system.
        mount("overlay", place, "overlay", _MS_NOSUID | _MS_NODEV, f"{layers},userxattr,volatile")
        prepared.append((tree["target"], open_tree(place)))
    return prepared


def _run_inside(first: int, action: Callable[[], None], host: socket.socket) -> None:
    """Run `action` in a child of this process inside the sandbox, as the owner of its user namespace."""
    os.setns(first, os.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            os.setns(first, os.CLONE_NEWNS)
            action()
        except BaseException as error:  # noqa: BLE001 - the host gets it
            _send(host, failure=f"{type(error).__name__}: {error}"[:1000])
        finally:
            os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:  # a program inside may kill a process of its own user
        raise OSError("a program in the sandbox ended it")
    host.recv(1)  # until the host has read the answer, and closes its end


def _send(host: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # the host has exited
        host.send(json.dumps(message).encode())


def _mounted_at(targets: Collection[str]) -> dict[int, str]:
    """Return the paths of mounts by their ids."""
    found = {}
    with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as lines:  # noqa: PTH123
        for line in lines:
            number, _, _, _, path, *_ = line.split(" ")
            if path in targets:
                found[path] = int(number)
    return {number: path for path, number in found.items()}  # the last mount at a path is the visible one


def _open_files(stopped: _Stopped, mounts: Mapping[int, str]) -> Iterator[str]:
    """Name what would see or change the files after the mount as if there were none."""
    yield from (f"{_name(tid)} waits" for tid in stopped.waiting)
    for pid, all_threads in stopped.threads.items():
        name = _name(pid)
        with contextlib.suppress(FileNotFoundError):
            for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                if _is_bound(f"/proc/{pid}", fd, mounts):
                    yield f"{name} has {os.readlink(f'/proc/{pid}/fd/{fd}')} open"  # noqa: PTH115
            for mapping in read_mappings(pid):
                if mapping.is_writable and mapping.is_shared and _is_below(mapping.path, mounts):
                    yield f"{name} has {mapping.path} in shared memory"
            if state(all_threads[0].tid) == "T" and _directory(pid, mounts):
                yield f"{name} is stopped"
    with open("/proc/1/net/unix", errors="replace", newline="\n") as lines:  # noqa: PTH123
        for line in lines:
            path = f"/{line.rstrip('\n').partition(' /')[2]}"
            if _is_below(path, mounts):
                yield f"a program listens at {path}"


def _is_bound(process: str, fd: str, mounts: Mapping[int, str]) -> bool:
    """Return True if a descriptor is bound to a file of the mounts: all but those only read."""
    with opened(f"{process}/fdinfo/{fd}") as info:
        fields = dict(re.findall(rb"(flags|mnt_id):\s*(\d+)", os.read(info, 4096)))
    if int(fields[b"mnt_id"]) not in mounts:
        return False
    is_read = int(fields[b"flags"], 8) & os.O_ACCMODE == os.O_RDONLY
    return not (is_read and stat.S_ISREG(os.stat(f"{process}/fd/{fd}").st_mode))  # noqa: PTH116


def _is_below(path: str, mounts: Mapping[int, str]) -> bool:
    return any(path == target or path.startswith(f"{target}/") for target in mounts.values())


def _directory(pid: int, mounts: Mapping[int, str]) -> str | None:
    """Return the working directory of a process if it is below one of the mounts."""
    with contextlib.suppress(FileNotFoundError):
        path = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
        return path if _is_below(path, mounts) else None
    return None


def _name(pid: int) -> str:
    """Return the command of a process, shortened."""
    try:
        with open(f"/proc/{pid}/cmdline", errors="replace") as file:  # noqa: PTH123
            return file.read(_NAME_CHARACTERS).replace("\0", " ").strip() or f"process {pid}"
    except OSError:
        return f"process {pid}"


def _lost(pid: int, found: list[Thread]) -> Iterator[str]:
    """Name what a Python session has beside its memory."""
    if len(found) > 1:
        yield f"{len(found) - 1} threads of the Python session"
    folder = f"/proc/{pid}/fd"
    files = {int(fd): os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}  # noqa: PTH115, PTH208
    own = {files[fd] for fd in _OWN_FILES if fd in files}
    yield from (f"{file[:_MOST_CHARACTERS]} in the Python session" for file in {*files.values()} - own)


def _await_idle(pid: int) -> None:
    end = time.monotonic() + _IDLE_TIMEOUT_S
    while time.monotonic() < end:
        # At first, the session is not accessible.
        with contextlib.suppress(PermissionError), open(f"/proc/{pid}/syscall") as file:  # noqa: PTH123
            if file.read().split()[:2] == _IDLE:
                return
        time.sleep(0.001)
    raise TimeoutError(f"the Python session was not ready in {_IDLE_TIMEOUT_S:g} s")
