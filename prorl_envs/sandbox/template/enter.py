"""Steps by which a forked process enters a sandbox. Runs in a template's child; independent of the host side.

The process joins all namespaces of the sandbox except the pid namespace, in which only its children are
created. So programs in the sandbox can neither see, signal nor trace the process.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Mapping, Sequence

from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.sandbox.linux.seccomp import install_filter, install_root_emulation
from prorl_envs.sandbox.linux.syscall_wrappers import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    ROOT_CAPABILITIES,
    drop_capabilities,
    prctl,
)

NAMESPACES = (
    os.CLONE_NEWUSER
    | os.CLONE_NEWNS
    | os.CLONE_NEWPID
    | os.CLONE_NEWNET
    | os.CLONE_NEWIPC
    | os.CLONE_NEWUTS
    | os.CLONE_NEWCGROUP
)

#: Signals that Python handles or ignores from its start, and signals whose disposition cannot be set.
_PYTHONS_OWN = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGKILL, signal.SIGSTOP}

#: With this score, the kernel kills a sandbox's process before others if the machine's memory runs out.
OOM_SCORE = b"500"


def join(pidfd: int, *, host_network: bool = False) -> None:
    """Enter the namespaces of the sandbox whose first process is `pidfd`.

    Args:
        host_network: True if the sandbox has the host's network, which this process has already.

    Raises:
        OSError: the sandbox has stopped.
    """
    os.setns(pidfd, NAMESPACES & ~os.CLONE_NEWNET if host_network else NAMESPACES)


def enter_cgroups(groups: Sequence[str]) -> None:
    """Start a new session and enter the control groups, before this process joins the sandbox.

    Args:
        groups: directories of the control groups; all processes started by this one are in them too.
    """
    # A signal to a process's own group crosses pid namespaces: without a separate session, a child that calls
    # kill(0, ...) would reach the template and every other tool server.
    lead_session()
    for group in groups:
        with open(f"{group}/cgroup.procs", "w") as file:  # noqa: PTH123 - the template imports no pathlib
            file.write("0")
    offer_to_oom_killer()


def drop_privileges(
    *,
    workdir: str,
    env: Mapping[str, str],
    parent: int,
    isolated: bool,
    emulate_root: bool = False,
    rlimits: Sequence[Sequence[int]] = (),
) -> None:
    """Drop all privileges of this process, which has joined the sandbox.

    Args:
        workdir: absolute path inside, the new working directory.
        env: the new environment, complete.
        parent: pid of the template; this process is killed when the template exits.
        isolated: False keeps capabilities and adds no filter (for the driver that does not isolate).
        emulate_root: whether the sandbox's processes are root of its image: see `SandboxSpec`.
        rlimits: kind, soft and hard limit of each resource; lower limits of the service have precedence.

    Raises:
        OSError: the kernel refused a step; the process must exit.
    """
    os.chdir(workdir)
    os.umask(0o022)
    for kind, soft, hard in rlimits:
        resource.setrlimit(kind, lowered(kind, soft, hard))
    if isolated:
        drop_capabilities(keep=ROOT_CAPABILITIES if emulate_root else 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if isolated:
        install_filter()
    if emulate_root:
        install_root_emulation()
    # Processes of the same uid cannot trace or read this one. A change of capabilities resets the flag.
    prctl(PR_SET_DUMPABLE, 0)
    die_with_parent(parent)
    os.environ.clear()
    os.environ.update(env)


def restore_signals() -> None:
    """Set the default disposition of every signal, and unblock all.

    Programs inherit ignored and blocked signals. This process inherits them from the program that started the
    service: `nohup`, `&` in a script, a job scheduler. Python itself restores the signals that it ignores.
    """
    for number in signal.valid_signals() - _PYTHONS_OWN:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def yield_processors(nice: int) -> None:
    """Raise the nice value of this process, and of all that it starts, to at least `nice`.

    As batch processes, they do not interrupt the event loop either when its request wakes them. On a busy
    machine, a hundred episodes have turns that are longer by 1.6 instead of 4.2 %.
    """
    if nice > 0:
        with contextlib.suppress(OSError):  # a container's system call filter may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def lead_session() -> None:
    """Make this process the leader of a session, unless it is one already."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def offer_to_oom_killer() -> None:
    """Make the kernel kill this process and its children before others if memory runs out."""
    # The kernel refuses if the score is higher already, or if /proc is read-only (then it is set already).
    with contextlib.suppress(OSError), opened("/proc/self/oom_score_adj", os.O_WRONLY) as file:
        os.write(file, OOM_SCORE)


def lowered(kind: int, soft: int, hard: int) -> tuple[int, int]:
    """Return the soft and hard limit of a resource, capped by this process's own hard limit."""
    _, current = resource.getrlimit(kind)
    if current != resource.RLIM_INFINITY:
        hard = min(hard, current)
    return min(soft, hard), hard


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process once its parent, `parent`, has exited."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
