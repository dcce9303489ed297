"""Launcher: a program that creates a sandbox from the options that bubblewrap would get (see `elf.py`).

It enters new namespaces, mounts as the options say, and forks the sandbox's first process. It is not itself
in the pid namespace. Then it drops its privileges, waits until the host requests the shell, starts the shell,
and reports its exit. All system calls are known in advance, so one program serves all sandboxes that are
alike: their own directories are found below a descriptor.

The steps are those of bubblewrap, in its order. The host's root is moved away first, so that no link in an
image leads there. Mounts belong to a user namespace above that of the sandbox's processes, and the latter can
have no child namespaces. See mount_namespaces(7), user_namespaces(7), pivot_root(2), and mount_setattr(2),
which needs Linux 5.12.
"""

import contextlib
import errno
import os
import resource
import signal
import socket
import struct
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from prorl_envs.sandbox.base import TerminalPlan
from prorl_envs.sandbox.launcher.elf import (
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
from prorl_envs.sandbox.launcher.enter import OOM_SCORE, lowered
from prorl_envs.sandbox.launcher.mounts import (
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
from prorl_envs.sandbox.launcher.writer import GO, HERE, LIFETIME, OWN, Writer
from prorl_envs.sandbox.linux.kernel_settings import Setting
from prorl_envs.sandbox.linux.seccomp import own_program, root_emulation
from prorl_envs.sandbox.linux.syscalls import (
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    ROOT_CAPABILITIES,
    capabilities,
    capability_sets,
)

#: Exit status of the trial, and size of a `siginfo_t`, which reports the exit of a child.
_STATUS, ENDING_SIZE = struct.Struct("=i"), 128

#: Maximum number of cached programs.
_KNOWN = 32
_NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)
#: The capability that the first process keeps. It grants nothing in a user namespace, but makes the process
#: more privileged than all others inside, so that none can trace it and take its lifetime socket.
_CAP_SYS_PACCT = 20

# Constants of the kernel.
_ALL, _CLOSE_ON_EXEC = 0xFFFFFFFF, 4
_DETACH = 2
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_P_ALL, _WEXITED = 0, 4
_PR_SET_NAME, _SECCOMP_SET_FILTER, _SPEC_ALLOW = 15, 1, 4
_SIOCSIFFLAGS, _INTERFACE_UP = 0x8914, 0x1 | 0x8
_TCSETS, _TIOCSWINSZ, _TIOCSPTLCK, _TIOCGPTPEER = 0x5402, 0x5414, 0x40045431, 0x5441
_INSTRUCTION_SIZE = 8
#: `struct sigaction`, and the size of its signal set.
_IGNORE, _SIGNALS_SIZE = struct.pack("<4Q", signal.SIG_IGN, 0, 0, 0), 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Common properties of the sandboxes that one program launches.

    Args:
        mounts: bubblewrap's mount options; paths that start with `own` are in the sandbox's directory.
        files: sources of the spec's own mounts that are not directories; the program depends on them.
        own: prefix of the paths in the sandbox's directory.
        workdir: absolute path inside, the initial working directory.
        uid: user and group inside.
        hostname: host name inside.
        network: whether it gets its own network namespace.
        rlimits: kind, soft and hard limit of each resource.
        emulate_root: whether its processes are root of its image: see `SandboxSpec`.
        settings: of its namespaces, each set if the kernel allows this user.
        trial: command that it must be able to run; may be empty.
        shell: shell that is started in it on the host's request.
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
    emulate_root: bool = False
    settings: tuple[Setting, ...] = ()


class LaunchProgram:
    """Launch program in memory, closed once no reference to it remains.

    Raises:
        OSError: this machine runs no programs from memory.
        ValueError: a path has a zero byte.
    """

    def __init__(self, making: LaunchPlan) -> None:
        taken = steps(making)
        self._trial = " ".join(making.trial[:1])
        self._whats = [step.what if isinstance(step, Call) else "" for step in taken]
        try:
            self.fd = in_memory(program(os.uname().machine, taken))
        except KeyError:
            raise OSError(errno.ENOEXEC, "this machine runs no program from memory") from None
        weakref.finalize(self, os.close, self.fd)

    def refusal(self, message: bytes) -> str:
        """Return the failure that a launcher's message reports, as text; empty if it reports success."""
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

    def cause(self, message: bytes) -> OSError | None:
        """Return the system error in such a message, if any."""
        number = FAILURE.unpack(message)[0] if len(message) == FAILURE.size else 0
        return OSError(number, os.strerror(number)) if number > 0 else None


class LaunchProgramCache:
    """LRU cache of launch programs."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, LaunchProgram] = OrderedDict()

    def get(self, making: LaunchPlan) -> LaunchProgram:
        """Return the program that launches such a sandbox.

        Raises:
            OSError: this machine runs no programs from memory.
            ValueError: a path has a zero byte.
        """
        key = _key(making)
        known = self._known.pop(key, None) or LaunchProgram(making)
        self._known[key] = known
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return known


def why_refused(making: LaunchPlan) -> str:
    """Start and stop one sandbox. Return the reason for failure, or "" on success. Blocks for some 10 ms."""
    try:
        made = LaunchProgram(making)
        ours, its_lifetime = socket.socketpair()
        way, its_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = os.open(making.own, os.O_PATH | os.O_DIRECTORY)
        with ours, its_lifetime, way, its_way:
            try:
                pid = spawn(["", NAME], [its_lifetime.fileno(), its_way.fileno(), own, made.fd])
            finally:
                os.close(own)
            its_way.close()
            with contextlib.suppress(BrokenPipeError):  # a launcher that exited at once has sent the reason
                way.send(GO)
            while not (refused := made.refusal(said := way.recv(ENDING_SIZE))) and said != GO:
                pass
        os.waitpid(pid, 0)
    except (OSError, ValueError) as error:
        return str(error)
    return refused


def _key(making: LaunchPlan) -> Hashable:
    """Return the part of a plan that is the same for all sandboxes that are alike."""
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
        making.emulate_root,
        making.settings,
    )
    return mounts, others, tuple(env.items())


def steps(making: LaunchPlan) -> list[Step]:
    """Return the steps of the program.

    Raises:
        ValueError: a path has a zero byte.
    """
    writer = Writer()
    _begin(writer, making)
    first = Mounts(writer, making.mounts, making.own).make()
    _enter(writer, making)
    _settle(writer, making, first=first)
    if making.trial:
        _try_out(writer)
    writer.send(first)
    writer.call("close_range", WAY + 1, _ALL, 0)
    _serve_shell(writer, making)
    _be_first(writer, making.settings)
    if making.trial:
        writer.label("trial")
        _bound_files(writer, making)
        writer.execute(making.trial[:1], making.trial[1:], {})
    return writer.steps


#: Descriptors opened before the socket pair between the launcher and the first process: the host's /proc, and
#: the directory of this process in it.
_PROC, _FOLDER = range(OWN + 1, TO_FIRST)


def _begin(writer: Writer, making: LaunchPlan) -> None:
    call = writer.call
    # This must be first: a process that exits with unread input discards the messages that it sent before.
    call("read", WAY, Stack(), 1, least=1, otherwise=END)
    call("close_range", WAY, OWN, _CLOSE_ON_EXEC)
    call("close_range", OWN + 1, _ALL, 0)
    # Refused if the service's own score is already higher.
    call("openat", HERE, "/proc/self/oom_score_adj", os.O_WRONLY, least=ANY)
    call("write", OWN + 1, OOM_SCORE, len(OOM_SCORE), least=ANY)
    call("close", OWN + 1, least=ANY)
    writer.openat(HERE, "/proc", os.O_PATH | os.O_DIRECTORY)
    writer.openat(HERE, "/proc/self", os.O_PATH | os.O_DIRECTORY)
    call("socketpair", socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, Stack())
    assert (writer.fresh(), writer.fresh()) == (TO_FIRST, TO_MAKER)
    # A descriptor leads to mounts of the previous namespace, the working directory to those of the new one.
    call("fchdir", OWN)
    writer.close(OWN)
    call("unshare", _NAMESPACES | (os.CLONE_NEWNET if making.network else 0), what="new namespaces")
    assert writer.openat(HERE, ".", os.O_PATH | os.O_DIRECTORY) == OWN
    call("umask", 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _map_user(writer, (0, os.geteuid()), (0, os.getegid()))
    # Allow one more user namespace below this one, and none below that.
    writer.put(_PROC, "sys/user/max_user_namespaces", "1", "limit of user namespaces")
    call("sethostname", making.hostname.encode(), len(making.hostname), what="hostname")
    if making.network:
        call("socket", socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, 0, what="loopback")
        fd = writer.fresh()
        call("ioctl", fd, _SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", _INTERFACE_UP), what="loopback")
        writer.close(fd)


def _map_user(writer: Writer, user: tuple[int, int], group: tuple[int, int]) -> None:
    """Map this process's ids in its new user namespace: ids there, and ids in the parent namespace."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", "{} {} 1".format(*user)),
        ("gid_map", "{} {} 1".format(*group)),
    ):
        writer.put(_PROC, f"self/{name}", content, "setting up uid map")


def _enter(writer: Writer, making: LaunchPlan) -> None:
    """Detach the rest of the host's root, and enter the user namespace of the sandbox's processes."""
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


def _settle(writer: Writer, making: LaunchPlan, *, first: int) -> None:
    """Drop every privilege, and every descriptor but `first` and the socket to the host."""
    call = writer.call
    # The sandbox's own device: through a descriptor of the host's, a program could change the host's device.
    null = writer.openat(HERE, "/dev/null", os.O_RDWR, "/dev/null")
    for stream in range(3):
        call("dup3", null, stream, 0)
    call("close_range", WAY + 1, first - 1, 0)
    call("close_range", first + 1, _ALL, 0)
    writer.open = {*range(3), WAY}
    call("chdir", making.workdir, what=f"chdir {making.workdir}")
    call("umask", 0o022)
    _bound(writer, [limit for limit in making.rlimits if limit[0] != resource.RLIMIT_NOFILE])
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    keep = ROOT_CAPABILITIES if making.emulate_root else 0
    for capability in range(capabilities()):
        if not keep & 1 << capability:
            call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    call("capset", *capability_sets(keep))
    for rules in (own_program(), root_emulation() if making.emulate_root else None):
        if rules is not None:
            program = Table((len(rules) // _INSTRUCTION_SIZE, rules))
            call("seccomp", _SECCOMP_SET_FILTER, _SPEC_ALLOW, program, what="system call filter")
    # Processes of the same uid cannot trace or read it. After the capabilities: changing them resets this.
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def _bound(writer: Writer, limits: Iterable[tuple[int, int, int]]) -> None:
    for kind, soft, hard in limits:
        bounds = struct.pack("=2Q", *lowered(kind, soft, hard))
        writer.call("prlimit64", 0, kind, bounds, 0, what="resource limits")


def _bound_files(writer: Writer, making: LaunchPlan) -> None:
    """Lower the open file limit, in a child that becomes a program of the sandbox.

    The launcher keeps the service's limit: the kernel compares a sender's limit with all descriptors in
    flight of the user, and the launcher must be able to send some while other processes have many in flight.
    """
    _bound(writer, [limit for limit in making.rlimits if limit[0] == resource.RLIMIT_NOFILE])


def _try_out(writer: Writer) -> None:
    writer.call("clone", _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD, 0, 0, what="execvp")
    writer.jump("trial", if_none=True)
    writer.call("wait4", -1, Stack(), 0, 0)
    writer.call("write", WAY, Stack(), _STATUS.size)


def _serve_shell(writer: Writer, making: LaunchPlan) -> None:
    """Start the shell on the host's request, and report the exits of the shell and the first process."""
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
    # The child shares the memory of this process, which waits for it: nothing is copied.
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
    # The first terminal that a session leader opens becomes the terminal of the session.
    call("ioctl", terminal, _TIOCGPTPEER, os.O_RDWR | os.O_CLOEXEC, what="a terminal")
    # The child's pidfd is open only in its parent.
    peer = max(terminal, content, its_report) + 1
    for stream in range(3):
        call("dup3", peer, stream, 0)
    call("dup3", content, plan.text_fd, 0)
    call("dup3", its_report, plan.report_fd, 0)
    _bound_files(writer, making)
    writer.execute(plan.programs, plan.arguments, plan.env)


def _be_first(writer: Writer, settings: tuple[Setting, ...]) -> None:
    """Write the steps of the first process.

    It mounts the sandbox's /proc, limits its namespaces, drops every privilege, and waits for end of file on
    its standard input. It has no signal handlers, so no signal from inside reaches it.
    """
    call, what = writer.call, "the first process"
    writer.label("first")
    call("close", TO_FIRST)
    call("setsid", what=what)
    call("prctl", _PR_SET_NAME, "sandbox", 0, 0, 0)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    call("mount", "proc", f"{ROOT}/proc", "proc", flags, "", what="Can't mount proc on /proc")
    call("write", TO_MAKER, GO, 1, least=1, what=what)
    # In parallel with the launcher's mounts: done by the launcher itself, these took 0.15 ms of a start.
    for name, value in settings:
        writer.try_to_put(_PROC, f"sys/{name}", value, TO_FIRST)
    # It joins the launcher's user namespace once that exists.
    call("read", TO_MAKER, Stack(), 1, least=1, what=what)
    call("openat", _FOLDER, "ns/user", os.O_RDONLY, what=what)
    call("setns", TO_FIRST, os.CLONE_NEWUSER, what=what)
    call("capset", *capability_sets(1 << _CAP_SYS_PACCT), what=what)
    # The kernel reaps orphans.
    call("rt_sigaction", signal.SIGCHLD, _IGNORE, 0, _SIGNALS_SIZE, what=what)
    # Otherwise the host's ordinary user could not access it through its files in /proc.
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0, what=what)
    # Close the descriptors before anything runs inside.
    call("close_range", TO_MAKER + 1, _ALL, 0, what=what)
    call("close_range", WAY, TO_MAKER - 1, 0, what=what)
    call("write", TO_MAKER, GO, 1, least=1, what=what)
    call("close", TO_MAKER, what=what)
    writer.label("wait")
    call("read", LIFETIME, Stack(), 1, least=1, otherwise=END)
    writer.jump("wait")
