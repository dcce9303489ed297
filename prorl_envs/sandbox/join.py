"""How a forked process enters a sandbox. Runs in a template's child; knows nothing of the host side.

The process joins every namespace of the sandbox but stays outside its pid namespace itself: only its
children are born there. So the sandbox can neither see, signal nor trace it.
"""

import os
import resource
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

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

#: Soft and hard bounds, lowered further where the service's own are lower.
LIMITS = {
    resource.RLIMIT_CORE: (0, 0),
    resource.RLIMIT_NOFILE: (4096, 65536),
    # Counted per user namespace since Linux 5.14, so per sandbox; before that, per user. Root is exempt.
    resource.RLIMIT_NPROC: (8192, 8192),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a process should become.

    Args:
        workdir: absolute path inside, its first working directory.
        env: its complete environment.
        parent: pid of the template; the process ends with it.
        isolated: False joins nothing and only takes on the rest (the driver that does not isolate).
    """

    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    parent: int
    isolated: bool = True


def join(pidfd: int, request: JoinRequest) -> None:
    """Enter the sandbox whose first process is `pidfd` and give up every privilege.

    Raises:
        OSError: the sandbox has ended, or the kernel refused a step; the process must end.
    """
    if request.isolated:
        os.setns(pidfd, NAMESPACES)
    os.chdir(request.workdir)
    os.umask(0o022)
    for kind, (soft, hard) in LIMITS.items():
        _lower_limit(kind, soft, hard)
    if request.isolated:
        drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Same-uid processes cannot trace or read it. After the capabilities: changing them resets this.
    prctl(PR_SET_DUMPABLE, 0)
    _end_with(request.parent)
    os.environ.clear()
    os.environ.update(request.env)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    _, current = resource.getrlimit(kind)
    if current != resource.RLIM_INFINITY:
        hard = min(hard, current)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _end_with(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
