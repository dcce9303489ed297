"""The program that makes a sandbox, from the options that bubblewrap would get (see `program.py`).

It goes into new namespaces, mounts what the options ask for, and has a child that is the sandbox's first
process. Of the pid namespace it is no part. Then it gives up what it may, waits for the host to want the
shell, begins that, and tells how it ended. All of it is system calls that are known before, so one program
serves all sandboxes that are alike: their own directories are found below a descriptor.

What bubblewrap does is done, in its order. The host's root is moved away first, so that no link in an image
leads there. Mounts belong to a user namespace above the one that the sandbox's processes are in, below which
there can be no other. See mount_namespaces(7), user_namespaces(7), pivot_root(2), and mount_setattr(2), which
needs Linux 5.12.
"""

import contextlib
import errno
import os
import signal
import socket
import struct
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from prorl_envs.sandbox.base import TerminalPlan
from prorl_envs.sandbox.join import OOM_SCORE, lowered
from prorl_envs.sandbox.making_mounts import (
    CLONE_PIDFD,
    HOST,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    ROOT,
    TO_FIRST,
    TO_MAKER,
    Mounts,
)
from prorl_envs.sandbox.making_steps import GO, HERE, LIFETIME, OWN, Writer
from prorl_envs.sandbox.program import (
    ANY,
    END,
    FAILURE,
    NAME,
    WAY,
    Call,
    Stack,
    Step,
    Table,
    in_memory,
    program,
    spawn,
)
from prorl_envs.sandbox.seccomp import own_program
from prorl_envs.sandbox.syscalls import (
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    capabilities,
    capability_sets,
)

#: How the trial ended; how a child ended, a `siginfo_t`.
_STATUS, ENDING_SIZE = struct.Struct("=i"), 128

#: Programs that are kept.
_KNOWN = 32
_NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)
#: The capability that the first process keeps. It is without power in a user namespace, and makes the process
#: more privileged than all others inside, so that none can trace it and take its lifetime socket.
_CAP_SYS_PACCT = 20

# Numbers of the kernel's.
_ALL, _CLOSE_ON_EXEC = 0xFFFFFFFF, 4
_DETACH = 2
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_P_ALL, _WEXITED = 0, 4
_PR_SET_NAME, _SECCOMP_SET_FILTER, _SPEC_ALLOW = 15, 1, 4
_SIOCSIFFLAGS, _INTERFACE_UP = 0x8914, 0x1 | 0x8
_TCSETS, _TIOCSWINSZ, _TIOCSPTLCK, _TIOCGPTPEER = 0x5402, 0x5414, 0x40045431, 0x5441
_INSTRUCTION_SIZE = 8
#: `struct sigaction`, and the size of its set of signals.
_IGNORE, _SIGNALS_SIZE = struct.pack("<4Q", signal.SIG_IGN, 0, 0, 0), 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What sandboxes have in common that one program makes.

    Args:
        mounts: bubblewrap's options for them; what begins with `own` is the sandbox's.
        files: which of the spec's own mounts are of no directories: where that changes, so does the program.
        own: how the paths in them begin that are of the sandbox's directory.
        workdir: absolute path inside, where what runs in it starts.
        uid: user and group inside.
        hostname: its.
        network: whether it gets one of its own.
        rlimits: kind, soft and hard bound of each resource.
        trial: what it must be able to run; may be empty.
        shell: what is begun in it when the host wants that.
    """

    mounts: tuple[str, ...]
    files: frozenset[str]
    own: str
    workdir: str
    uid: int
    hostname: str
    network: bool
    rlimits: tuple[tuple[int, int, int], ...]
    trial: tuple[str, ...]
    shell: TerminalPlan | None


class Program:
    """A program in memory, until nobody has it any more.

    Raises:
        OSError: this machine runs none from memory.
        ValueError: a path has a zero byte.
    """

    def __init__(self, making: Making) -> None:
        taken = steps(making)
        self._trial = " ".join(making.trial[:1])
        self._whats = [step.what if isinstance(step, Call) else "" for step in taken]
        try:
            self.fd = in_memory(program(os.uname().machine, taken))
        except KeyError:
            raise OSError(errno.ENOEXEC, "this machine runs no program from memory") from None
        weakref.finalize(self, os.close, self.fd)

    def refusal(self, message: bytes) -> str:
        """What a maker says that could not be done, in words; empty where it says that all is well."""
        if not message:
            return "the process that makes it ended"
        if len(message) == _STATUS.size:
            status = os.waitstatus_to_exitcode(*_STATUS.unpack(message))
            return f"execvp {self._trial}: ended with {status}" if status else ""
        if len(message) == FAILURE.size:
            number, index = FAILURE.unpack(message)
            what = self._whats[index] if index < len(self._whats) else ""
            return f"{what or 'making it'}: {os.strerror(number) if number > 0 else 'it ended'}"
        return ""


class Programs:
    """Those that were wanted last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Program] = OrderedDict()

    def get(self, making: Making) -> Program:
        """The program that makes such a sandbox.

        Raises:
            OSError: this machine runs none from memory.
            ValueError: a path has a zero byte.
        """
        key = _key(making)
        known = self._known.pop(key, None) or Program(making)
        self._known[key] = known
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return known


def why_refused(making: Making) -> str:
    """Make one, and end it at once. Returns why that cannot be; empty where it can. Blocks for some 10 ms."""
    try:
        made = Program(making)
        ours, its_lifetime = socket.socketpair()
        way, its_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = os.open(making.own, os.O_PATH | os.O_DIRECTORY)
        with ours, its_lifetime, way, its_way:
            try:
                pid = spawn(["", NAME], [its_lifetime.fileno(), its_way.fileno(), own, made.fd])
            finally:
                os.close(own)
            its_way.close()
            with contextlib.suppress(BrokenPipeError):  # what ended at once has said why
                way.send(GO)
            while not (refused := made.refusal(said := way.recv(ENDING_SIZE))) and said != GO:
                pass
        os.waitpid(pid, 0)
    except (OSError, ValueError) as error:
        return str(error)
    return refused


def _key(making: Making) -> Hashable:
    """What is the same for another sandbox that is alike."""
    own, env = making.own, making.shell.env if making.shell is not None else {}
    mounts = tuple(
        "\0" + option[len(own) :] if option.startswith(own) else option for option in making.mounts
    )
    others = (
        making.files,
        making.workdir,
        making.uid,
        making.hostname,
        making.network,
        making.rlimits,
        making.trial,
    )
    return mounts, others, tuple(env.items())


def steps(making: Making) -> list[Step]:
    """The program.

    Raises:
        ValueError: a path has a zero byte.
    """
    writer = Writer()
    _begin(writer, making)
    first = Mounts(writer, making.mounts, making.own).make()
    _enter(writer, making)
    _settle(writer, making, keep=first)
    if making.trial:
        _try_out(writer)
    writer.send(first)
    writer.call("close_range", WAY + 1, _ALL, 0)
    _serve_shell(writer, making)
    _be_first(writer)
    if making.trial:
        writer.label("trial")
        writer.execute(making.trial[:1], making.trial[1:], {})
    return writer.steps


#: Descriptors that are opened at once, before the way between the maker and the first process: something to
#: read nothing from; the host's view of processes, and the folder of this process in it.
_NULL, _PROC, _FOLDER = range(OWN + 1, TO_FIRST)


def _begin(writer: Writer, making: Making) -> None:
    call = writer.call
    # First of all: who ends with something unread takes what it said before with it.
    call("read", WAY, Stack(), 1, least=1, otherwise=END)
    call("close_range", WAY, OWN, _CLOSE_ON_EXEC)
    call("close_range", OWN + 1, _ALL, 0)
    # Refused where the service's own is higher already.
    call("openat", HERE, "/proc/self/oom_score_adj", os.O_WRONLY, least=ANY)
    call("write", OWN + 1, OOM_SCORE, len(OOM_SCORE), least=ANY)
    call("close", OWN + 1, least=ANY)
    writer.openat(HERE, "/dev/null", os.O_RDWR)
    writer.openat(HERE, "/proc", os.O_PATH | os.O_DIRECTORY)
    writer.openat(HERE, "/proc/self", os.O_PATH | os.O_DIRECTORY)
    call("socketpair", socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, Stack())
    assert (writer.fresh(), writer.fresh()) == (TO_FIRST, TO_MAKER)
    # A descriptor leads to the mounts of the namespace before, the working directory to those of the new one.
    call("fchdir", OWN)
    writer.close(OWN)
    call("unshare", _NAMESPACES | (os.CLONE_NEWNET if making.network else 0), what="new namespaces")
    assert writer.openat(HERE, ".", os.O_PATH | os.O_DIRECTORY) == OWN
    call("umask", 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _map_user(writer, (0, os.geteuid()), (0, os.getegid()))
    # One more user namespace below this one, and none below that.
    writer.put(_PROC, "sys/user/max_user_namespaces", "1", "limit of user namespaces")
    call("sethostname", making.hostname.encode(), len(making.hostname), what="hostname")
    if making.network:
        call("socket", socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0, what="loopback")
        fd = writer.fresh()
        call("ioctl", fd, _SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", _INTERFACE_UP), what="loopback")
        writer.close(fd)


def _map_user(writer: Writer, user: tuple[int, int], group: tuple[int, int]) -> None:
    """Say who this process is in its new user namespace: numbers there, and in the one above."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", "{} {} 1".format(*user)),
        ("gid_map", "{} {} 1".format(*group)),
    ):
        writer.put(_PROC, f"self/{name}", content, "setting up uid map")


def _enter(writer: Writer, making: Making) -> None:
    """Leave what is left of the host behind, for the user namespace of the sandbox's processes."""
    call = writer.call
    call("mount", "", HOST, "", MS_REC | MS_PRIVATE, "")
    call("umount2", HOST, _DETACH)
    call("chdir", ROOT)
    call("pivot_root", ".", ".", what="pivot_root")
    call("umount2", ".", _DETACH)
    call("chdir", "/")
    call("unshare", os.CLONE_NEWUSER, what="new namespaces")
    _map_user(writer, (making.uid, 0), (making.uid, 0))
    call("write", TO_FIRST, GO, 1, least=1)
    call("read", TO_FIRST, Stack(), 1, least=1, what="the first process")


def _settle(writer: Writer, making: Making, *, keep: int) -> None:
    """Give up every privilege, and every descriptor but one and the way to the host."""
    call = writer.call
    for stream in range(3):
        call("dup3", _NULL, stream, 0)
    call("close_range", WAY + 1, keep - 1, 0)
    call("close_range", keep + 1, _ALL, 0)
    writer.open = {*range(3), WAY}
    call("chdir", making.workdir, what=f"chdir {making.workdir}")
    call("umask", 0o022)
    for kind, soft, hard in making.rlimits:
        call("prlimit64", 0, kind, struct.pack("=2Q", *lowered(kind, soft, hard)), 0, what="resource limits")
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(capabilities()):
        call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    call("capset", *capability_sets(0))
    if (rules := own_program()) is not None:
        program = Table((len(rules) // _INSTRUCTION_SIZE, rules))
        call("seccomp", _SECCOMP_SET_FILTER, _SPEC_ALLOW, program, what="system call filter")
    # Same-uid processes cannot trace or read it. After the capabilities: changing them resets this.
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def _try_out(writer: Writer) -> None:
    writer.call("clone", _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD, 0, 0, what="execvp")
    writer.jump("trial", if_none=True)
    writer.call("wait4", -1, Stack(), 0, 0)
    writer.call("write", WAY, Stack(), _STATUS.size)


def _serve_shell(writer: Writer, making: Making) -> None:
    """Wait for the host to want the shell, begin it, and tell how it and the first process end."""
    call, plan = writer.call, making.shell
    call("read", WAY, Stack(), 1, least=1, otherwise=END)
    if plan is None or not plan.programs:
        writer.jump(END)
        return
    call("memfd_create", "command", os.MFD_CLOEXEC)
    content = writer.fresh()
    call("pipe2", Stack(), os.O_CLOEXEC)
    report, its_report = writer.fresh(), writer.fresh()
    flags = os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK
    terminal = writer.openat(HERE, "/dev/ptmx", flags, "a terminal")
    call("ioctl", terminal, _TIOCSPTLCK, bytes(4), what="a terminal")
    call("ioctl", terminal, _TCSETS, plan.settings, what="a terminal")
    size = struct.pack("=4H", *plan.size, 0, 0)
    call("ioctl", terminal, _TIOCSWINSZ, size, what="a terminal")
    # It and the child have one memory, and this one waits: nothing is copied.
    call("clone", _CLONE_VM | _CLONE_VFORK | CLONE_PIDFD | signal.SIGCHLD, 0, Stack(), what="a shell")
    writer.jump("shell", if_none=True)
    writer.send(terminal, report, writer.fresh(), content)
    call("close_range", WAY + 1, _ALL, 0)
    writer.label("children")
    call("waitid", _P_ALL, 0, Stack(), _WEXITED, 0, otherwise=END)
    call("write", WAY, Stack(), ENDING_SIZE, least=ANY)
    writer.jump("children")
    writer.label("shell")
    call("setsid")
    # The first terminal that a session's leader opens is the session's.
    call("ioctl", terminal, _TIOCGPTPEER, os.O_RDWR | os.O_CLOEXEC, what="a terminal")
    # The descriptor of the child is its parent's alone.
    peer = max(terminal, content, its_report) + 1
    for stream in range(3):
        call("dup3", peer, stream, 0)
    call("dup3", content, plan.text_fd, 0)
    call("dup3", its_report, plan.report_fd, 0)
    writer.execute(plan.programs, plan.arguments, plan.env)


def _be_first(writer: Writer) -> None:
    """The first process: it mounts the sandbox's view of processes, gives up every privilege, and waits for
    the end of its standard input. Without a handler no signal from inside reaches it."""
    call, what = writer.call, "the first process"
    writer.label("first")
    call("close", TO_FIRST)
    call("setsid", what=what)
    call("prctl", _PR_SET_NAME, "sandbox", 0, 0, 0)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    call("mount", "proc", f"{ROOT}/proc", "proc", flags, "", what="Can't mount proc on /proc")
    call("write", TO_MAKER, GO, 1, least=1, what=what)
    # Its namespace of users is that of its maker, once there is one.
    call("read", TO_MAKER, Stack(), 1, least=1, what=what)
    call("openat", _FOLDER, "ns/user", os.O_RDONLY, what=what)
    call("setns", TO_FIRST, os.CLONE_NEWUSER, what=what)
    call("capset", *capability_sets(1 << _CAP_SYS_PACCT), what=what)
    # Orphans are reaped by the kernel.
    call("rt_sigaction", signal.SIGCHLD, _IGNORE, 0, _SIGNALS_SIZE, what=what)
    # Or the host's ordinary user could not reach it by its files in /proc.
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0, what=what)
    # Before anything runs inside.
    call("close_range", TO_MAKER + 1, _ALL, 0, what=what)
    call("close_range", WAY, TO_MAKER - 1, 0, what=what)
    call("write", TO_MAKER, GO, 1, least=1, what=what)
    call("close", TO_MAKER, what=what)
    writer.label("wait")
    call("read", LIFETIME, Stack(), 1, least=1, otherwise=END)
    writer.jump("wait")
