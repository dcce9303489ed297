"""Children of a tool server that do not exec: the Python kernel, warm and without anything of the server's,
and the one that ends all others."""

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

from prorl_envs.sandbox import inside

#: Seconds a kernel may take to accept a cell; between cells it does nothing but read.
SEND_TIMEOUT_S = 5.0
_PR_SET_DUMPABLE = 4
_KILL_ROUNDS = 1000
_KILL_ATTEMPTS = 20
_KILL_TIMEOUT_MS = 1000


class Kernel:
    """A forked kernel process and the descriptors to it. Does the system calls; decides nothing.

    Args:
        workdir: its first directory.

    Raises:
        OSError: it cannot be forked.
    """

    def __init__(self, workdir: str) -> None:
        self.control, inside = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _become_kernel(workdir, inside.fileno(), output)
        except BaseException:
            self.control.close()
            os.close(self.output)
            raise
        finally:
            inside.close()
            os.close(output)
        self.pidfd = os.pidfd_open(self.pid)
        self.control.settimeout(SEND_TIMEOUT_S)

    def send(self, frame: bytes | bytearray) -> None:
        """Hand over a cell. A kernel that has gone is left to its exit; one that does not read is killed."""
        try:
            self.control.sendall(frame)
        except TimeoutError:
            self.kill()
        except (BrokenPipeError, ConnectionResetError):
            pass

    def interrupt(self) -> None:
        """Ctrl-C for the kernel and the processes its cell started."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the kernel and the processes of its group."""
        self._signal(signal.SIGKILL)

    def reap(self) -> int:
        """The exit status, negative for a signal; waits for it."""
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Close all descriptors. The process must have been reaped."""
        self.control.close()
        os.close(self.output)
        os.close(self.pidfd)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # just forked: not yet the leader of its group
            signal.pidfd_send_signal(self.pidfd, number)


def end_processes() -> None:
    """Kill every process in the sandbox but its first.

    Done by a child, because only children live in the sandbox's pid namespace, where one call kills all at
    once. A process may fork while the others die, so it goes on until nothing is left to be killed; and one
    may stop or kill each that is born, this child included, so what the child leaves is killed one by one
    from here, out of its reach.

    Raises:
        OSError: new processes came faster than they could be killed, or this is no pid namespace of the
            sandbox's own: then "all" would be everything this user runs.
    """
    if inside.is_inside():
        inside.end_others()
        return
    # In the /proc of a namespace that this process is in, it finds itself.
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
    except BlockingIOError:  # the sandbox uses up its processes
        return False
    if pid == 0:
        try:
            if os.getppid() == 0:  # the kernel names a parent outside the pid namespace 0
                _kill_all_but_first()
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if not ended.poll(_KILL_TIMEOUT_MS):
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def _kill_all_but_first() -> None:
    for _ in range(_KILL_ROUNDS):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not any(_lives(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
            os._exit(0)


def _kill_one_by_one() -> None:
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or name == "1":
            continue
        # A process's folder serves as its pidfd. Its number here is none by which it could be killed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            folder = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                signal.pidfd_send_signal(folder, signal.SIGKILL)
            finally:
                os.close(folder)


def _lives(pid: str) -> bool:
    """Whether this is a process other than the sandbox's first and the caller, and not merely unreaped."""
    if int(pid) in (1, os.getpid()):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _become_kernel(workdir: str, control: int, output: int) -> None:
    """The forked child's whole life: nothing of the server is left open."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        # By way of high numbers, so that no target overwrites a source.
        sources = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (null, output, output, control)]
        for target, fd in enumerate(sources):
            os.dup2(fd, target, inheritable=target < 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # The server is closed to the sandbox's processes; this one is the sandbox's own, like any other.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
        os.chdir(workdir)
        # The server imports nothing from the sandbox's files; this process may, it is one of them.
        if PathFinder not in sys.meta_path:
            sys.meta_path.append(PathFinder)
        from prorl_envs.tools.kernel import main  # only here: a server without Python need not know IPython

        main()
    finally:
        error = sys.exception()
        if error is not None:
            os.write(2, "".join(traceback.format_exception(error)).encode("utf-8", "replace"))
        os._exit(0 if error is None else 1)
