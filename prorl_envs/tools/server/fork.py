"""Children of a tool server that fork without exec: the Python kernel, and the killer of all processes."""

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from importlib.machinery import PathFinder

from prorl_envs.sandbox.linux.descriptors import close_all_but, opened, reopen_libraries
from prorl_envs.sandbox.template import sandbox_init
from prorl_envs.tools.protocol.messages import MEMORY_FD, Framer
from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.session import SessionProcess

#: Maximum bytes of a kernel's frame: its display data, with room for the rest of the message.
FRAME_LIMIT = 8 * 1024 * 1024
#: Timeout of sending a cell, in seconds. Between cells, a kernel only reads.
SEND_TIMEOUT_S = 5.0
_PR_SET_DUMPABLE = 4
_KILL_ROUNDS = 1000
_KILL_ATTEMPTS = 20
_KILL_TIMEOUT_MS = 1000


class Kernel(SessionProcess):
    """Forked kernel process and its descriptors.

    Args:
        workdir: directory in which the kernel starts.
        loop: the server's loop.
        buffer: receives the kernel's output.
        memory: descriptor that the kernel gets as `MEMORY_FD`.

    Raises:
        OSError: the kernel cannot be forked.
    """

    def __init__(self, workdir: str, loop: EventLoop, buffer: OutputBuffer, memory: int | None) -> None:
        self.control, inside = socket.socketpair()
        ours, output = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                _become_kernel(workdir, inside.fileno(), output, memory)
        except BaseException:
            self.control.close()
            os.close(ours)
            raise
        finally:
            inside.close()
            os.close(output)
        super().__init__(pid, ours, (ours, self.control.fileno()), loop=loop, buffer=buffer)
        self.control.settimeout(SEND_TIMEOUT_S)
        self.framer = Framer(FRAME_LIMIT)

    def send(self, frame: bytes | bytearray) -> None:
        """Send a cell. Kill the kernel if it does not read. Do nothing if it has exited."""
        try:
            self.control.sendall(frame)
        except TimeoutError:
            self.kill()
        except (BrokenPipeError, ConnectionResetError):
            pass

    def interrupt(self) -> None:
        """Interrupt the kernel and the processes its cell started, like Ctrl-C."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the kernel and the processes of its group."""
        self._signal(signal.SIGKILL)

    def discard(self) -> int:
        status = super().discard()
        self.control.detach()  # its descriptor has been closed
        return status

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # the kernel was just forked, and does not yet lead a group
            signal.pidfd_send_signal(self.pidfd, number)


def end_processes() -> None:
    """Kill every process in the sandbox except the first.

    A child does this, because only children are in the sandbox's pid namespace, where one call kills all
    processes at once. A process may fork while others die, so the child repeats the call until no process is
    left. A process may also stop or kill each new process, including the child. Then this process, which they
    cannot reach, kills the remaining processes one by one.

    Raises:
        OSError: new processes start faster than they can be killed; or the sandbox has no pid namespace of
            its own, so that the call would kill all processes of this user.
    """
    if sandbox_init.is_inside():
        sandbox_init.kill_others()
        return
    # If /proc belongs to a namespace of this process, it contains this process.
    if os.path.exists("/proc/self"):  # noqa: PTH110
        raise OSError(errno.EPERM, "the sandbox has no pid namespace of its own")
    for _ in range(_KILL_ATTEMPTS):
        if _killed_by_child():
            return
        _kill_one_by_one()
    raise OSError(errno.EAGAIN, "the sandbox starts processes faster than they can be killed")


def _killed_by_child() -> bool:
    try:
        pid = os.fork()
    except BlockingIOError:  # the sandbox has used up its limit of processes
        return False
    if pid == 0:
        try:
            if os.getppid() == 0:  # the kernel reports parent 0 if the parent is outside the pid namespace
                _kill_all_but_first()
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    exit_poll = select.poll()
    exit_poll.register(pidfd, select.POLLIN)
    if not exit_poll.poll(_KILL_TIMEOUT_MS):
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def _kill_all_but_first() -> None:
    for _ in range(_KILL_ROUNDS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not any(pid != 1 and sandbox_init.lives(pid) for pid in sandbox_init.processes()):
            os._exit(0)


def _kill_one_by_one() -> None:
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or name == "1":
            continue
        # A process's /proc directory serves as its pidfd. Its number there is not valid for kill(2) here.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            opened(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY) as folder,
        ):
            signal.pidfd_send_signal(folder, signal.SIGKILL)


def _become_kernel(workdir: str, control: int, output: int, memory: int | None) -> None:
    """Run the kernel in the forked child until it exits. Closes all of the server's descriptors first."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        # Copy the descriptors to high numbers first, so that no target overwrites a source.
        sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (null, output, output, control)]
        for target, fd in enumerate(sources):
            os.dup2(fd, target, inheritable=target < 3)
        kept = [3]
        if memory is not None:
            kept.append(os.dup2(memory, MEMORY_FD, inheritable=False))
        close_all_but(kept)
        reopen_libraries()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The kernel is accessible to the sandbox's processes, as one of them; the server is not.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
        os.chdir(workdir)
        # The server imports nothing from the sandbox's files; this process may, as part of the sandbox.
        if PathFinder not in sys.meta_path:
            sys.meta_path.append(PathFinder)
        from prorl_envs.tools.server.python_kernel import (
            main,  # only here: a server without Python does not need IPython
        )

        main()
    finally:
        error = sys.exception()
        if error is not None:
            # Only the message, because the paths of this package's files are the host's.
            os.write(2, "".join(traceback.format_exception_only(error)).encode("utf-8", "replace"))
        os._exit(0 if error is None else 1)
