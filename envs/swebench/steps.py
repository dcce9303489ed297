"""Steps shared by both build methods: git commands, and the lock of the folder that is built once."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.errors import EnvironmentFault
from prorl_envs.tools.pool.sandbox_session import SandboxSession

STEP_TIMEOUT_S = 1200.0
_LOCK_POLL_S = 0.05

#: Excluded from the repository: files that installing and running Python creates in a tree. Source releases
#: rarely include the repository's own .gitignore.
EXCLUDED = "build/\n*.egg-info/\n.eggs/\n__pycache__/\n*.py[cod]\n.pytest_cache/\n.tox/\n.cache/\n.venv/\n"

# One commit by a fixed author at a fixed time, so that its name is the same everywhere. Without a reflog, and
# packed, so that no earlier state can be found. `log.showRoot` keeps the script's `git show` from printing
# the tree.
GIT = """
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_AUTHOR_DATE='2000-01-01T00:00:00Z'
export GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost GIT_COMMITTER_DATE='2000-01-01T00:00:00Z'
"""
INIT = """
git -c init.defaultBranch=main init --quiet
git config core.logAllRefUpdates false
git config log.showRoot false
git config gc.auto 0
rm -rf .git/hooks
cat > .git/info/exclude
git add --all
git commit --quiet --message='Base commit'
"""
SEAL = """
git add --all
git diff --cached --quiet || git commit --quiet --amend --no-edit
git reflog expire --expire=now --all
git gc --quiet --prune=now
"""


def tagged(tag: str | None) -> str:
    """Return the command that tags the commit, for packages that compute their version from git."""
    return f"git tag --force {tag}\n" if tag else ""


async def step(
    place: SandboxSession, name: str, script: str, *, cwd: str = "/testbed", stdin: bytes = b""
) -> str:
    """Run one step of a build, and return its output.

    Raises:
        EnvironmentFault: it failed; the message names the step and includes the end of its output.
    """
    shell = ["/bin/bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script]
    done = await place.tools.run(shell, cwd=cwd, stdin=stdin, timeout_s=STEP_TIMEOUT_S)
    output = done.output.decode(errors="replace")
    if done.exit_code != 0:
        why = "took too long" if done.timed_out else f"exit status {done.exit_code}"
        raise EnvironmentFault(
            f"building the instance: {name} failed ({why}): {output[-1500:].strip()}",
            hint="the row's x_env, or its image, says how it is built",
        )
    return output


@asynccontextmanager
async def exclusive(path: Path) -> AsyncIterator[None]:
    """Hold a lock file; the kernel releases it even if this process is killed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Polling: the holder may be another process, and a thread that waits in the kernel cannot be
        # cancelled.
        while not _locked(fd):  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
