"""How a forked process enters a sandbox. Runs in a template's child; knows nothing of the host side.

The process joins every namespace of the sandbox but stays outside its pid namespace itself: only its
children are born there. So the sandbox can neither see, signal nor trace it.
"""

import os
import resource
import signal
from collections.abc import Mapping

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

#: Soft and hard bounds, lowered further where the service's own are lower.
LIMITS = {
    resource.RLIMIT_CORE: (0, 0),
    resource.RLIMIT_NOFILE: (4096, 65536),
    # Counted per user namespace since Linux 5.14, so per sandbox; before that, per user. Root is exempt.
    resource.RLIMIT_NPROC: (8192, 8192),
}


def join(pidfd: int, *, workdir: str, env: Mapping[str, str], parent: int, isolated: bool) -> None:
    """Enter the sandbox whose first process is `pidfd` and give up every privilege.

    Args:
        workdir: absolute path inside, this process's first working directory.
        env: its complete environment from now on.
        parent: pid of the template; this process ends with it.
        isolated: False joins nothing and does only the rest (for the driver that does not isolate).

    Raises:
        OSError: the sandbox has ended, or the kernel refused a step; the process must end.
    """
    # A signal to one's own process group passes through pid namespaces: without a session of its own, a
    # child that says kill(0, ...) would reach the template and every other tool server.
    os.setsid()
    if isolated:
        os.setns(pidfd, NAMESPACES)
    os.chdir(workdir)
    os.umask(0o022)
    for kind, (soft, hard) in LIMITS.items():
        _lower_limit(kind, soft, hard)
    if isolated:
        drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if isolated:
        install_filter()
    # Same-uid processes cannot trace or read it. After the capabilities: changing them resets this.
    prctl(PR_SET_DUMPABLE, 0)
    _end_with(parent)
    os.environ.clear()
    os.environ.update(env)


def _lower_limit(kind: int, soft: int, hard: int) -> None:
    _, current = resource.getrlimit(kind)
    if current != resource.RLIM_INFINITY:
        hard = min(hard, current)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _end_with(parent: int) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
