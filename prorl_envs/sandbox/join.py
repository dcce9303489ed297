"""How a forked process enters a sandbox. Runs in a template's child; knows nothing of the host side.

The process joins every namespace of the sandbox but stays outside its pid namespace itself: only its
children are born there. So the sandbox can neither see, signal nor trace it.
"""

import contextlib
import os
import resource
import signal
from collections.abc import Mapping, Sequence

from prorl_envs.sandbox.seccomp import install_filter
from prorl_envs.sandbox.syscalls import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
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

#: How much rather than others the kernel kills a sandbox's process where the machine's memory runs out.
OOM_SCORE = b"500"


def join(pidfd: int, *, host_network: bool = False) -> None:
    """Enter the namespaces of the sandbox whose first process is `pidfd`.

    Args:
        host_network: True where the sandbox has the host's, which cannot be joined and need not be.

    Raises:
        OSError: the sandbox has ended.
    """
    os.setns(pidfd, NAMESPACES & ~os.CLONE_NEWNET if host_network else NAMESPACES)


def begin(groups: Sequence[str]) -> None:
    """First of all, while this is still an ordinary process of the host that does nothing yet.

    Args:
        groups: folders of the control groups to enter, so that all that starts here is born in them.
    """
    # A signal to one's own process group passes through pid namespaces: without a session of its own, a
    # child that says kill(0, ...) would reach the template and every other tool server.
    lead_session()
    for group in groups:
        with open(f"{group}/cgroup.procs", "w") as file:  # noqa: PTH123 - the template imports no pathlib
            file.write("0")
    offer_to_oom_killer()


def settle(
    *,
    workdir: str,
    env: Mapping[str, str],
    parent: int,
    isolated: bool,
    rlimits: Sequence[Sequence[int]] = (),
) -> None:
    """Give up every privilege, in the sandbox.

    Args:
        workdir: absolute path inside, this process's first working directory.
        env: its complete environment from now on.
        parent: pid of the template; this process ends with it.
        isolated: False does without (for the driver that does not isolate).
        rlimits: kind, soft and hard bound of each resource; where the service's own are lower, those.

    Raises:
        OSError: the kernel refused a step; the process must end.
    """
    os.chdir(workdir)
    os.umask(0o022)
    for kind, soft, hard in rlimits:
        resource.setrlimit(kind, lowered(kind, soft, hard))
    if isolated:
        drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if isolated:
        install_filter()
    # Same-uid processes cannot trace or read it. After the capabilities: changing them resets this.
    prctl(PR_SET_DUMPABLE, 0)
    end_with(parent)
    os.environ.clear()
    os.environ.update(env)


def yield_processors(nice: int) -> None:
    """Make this process at least that nice, and all that it starts."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def lead_session() -> None:
    """Make this process the leader of a session, unless it is one already."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def offer_to_oom_killer() -> None:
    """Have the kernel kill this process and what it starts before others, where memory runs out."""
    # Refused where the service's own is higher already, or where /proc is read-only: done before, there.
    with contextlib.suppress(OSError):
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(file, OOM_SCORE)
        finally:
            os.close(file)


def lowered(kind: int, soft: int, hard: int) -> tuple[int, int]:
    """Soft and hard bound of a resource; where this process's own are lower, those."""
    _, current = resource.getrlimit(kind)
    if current != resource.RLIM_INFINITY:
        hard = min(hard, current)
    return min(soft, hard), hard


def end_with(parent: int) -> None:
    """Have the kernel kill this process once its parent, `parent`, has ended."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
