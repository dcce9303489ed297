"""Parts of both build methods: git commands, and the execution of a step."""

from prorl_envs.errors import EnvironmentFault
from prorl_envs.tools.pool.sandbox_session import SandboxSession

STEP_TIMEOUT_S = 1200.0

#: Excluded from the repository: files that installing and running Python creates in a tree. Source releases
#: rarely include the repository's own .gitignore.
EXCLUDED = "build/\n*.egg-info/\n.eggs/\n__pycache__/\n*.py[cod]\n.pytest_cache/\n.tox/\n.cache/\n.venv/\n"

# The commit has a fixed author and time, so its name is the same on all machines. There is no reflog, and
# unreachable objects are removed, so no earlier state can be found. Without `log.showRoot`, the test script's
# `git show` does not print the whole tree.
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
    session: SandboxSession, name: str, script: str, *, cwd: str = "/testbed", stdin: bytes = b""
) -> str:
    """Run one step of a build, and return its output.

    Raises:
        EnvironmentFault: the step failed; the message names it and includes the end of its output.
    """
    shell = ["/bin/bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script]
    done = await session.tools.run(shell, cwd=cwd, stdin=stdin, timeout_s=STEP_TIMEOUT_S)
    output = done.output.decode(errors="replace")
    if done.exit_code != 0:
        reason = "took too long" if done.timed_out else f"exit status {done.exit_code}"
        raise EnvironmentFault(
            f"building the instance: {name} failed ({reason}): {output[-1500:].strip()}",
            hint="check the row's x_env, or its image",
        )
    return output
