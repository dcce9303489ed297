"""Copy of the agent's workspace in a separate sandbox, in which the checks run.

The agent's workspace is mounted read-only in a fresh sandbox, where tar copies it. So only a process with the
agent's own rights reads hostile content (links that lead out, named pipes, huge sparse files, a file that is
replaced by a link during the copy), and the host opens no path of the workspace.
"""

from enum import IntEnum

from prorl_envs.errors import GraderError
from prorl_envs.sandbox.base import Sandbox, SandboxSpec, workspace_mount
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Largest workspace that is graded, in bytes of its archive; each entry counts at least 512.
MAX_BYTES = 256 * 2**20
#: Timeout of the copy, in seconds.
TIMEOUT_S = 120.0

#: Longest path in a graded workspace, in characters; the system's limit is 4,096 bytes with the prefix.
_MAX_PATH = 1000

_SUBMISSION = "/submission"


class _Exit(IntEnum):
    COPIED = 0
    TOO_LARGE = 3
    REFUSED = 4


# An unreadable directory would be copied empty, so its files would count as removed; a path that is too long
# cannot be extracted. Both are refused. tar exits with 1 if a file changed during the copy, and with 141 if
# head reached its limit.
_COPY = f"""
if [ ! -r {_SUBMISSION} ] || [ ! -x {_SUBMISSION} ]; then printf .; exit {_Exit.REFUSED}; fi
cd {_SUBMISSION} || exit 1
printf -v long '?%.0s' {{1..{_MAX_PATH}}}
found=$(find . -path "$long*" -print -quit \
            -o -type d \\( ! -readable -o ! -executable \\) -print -quit \
            -o -type f ! -readable -print -quit 2>/dev/null | head --bytes=500)
if [ -n "$found" ]; then printf %s "$found"; exit {_Exit.REFUSED}; fi
tar --create --file=- . | head --bytes=$(({MAX_BYTES} + 1)) > /tmp/snapshot
case ${{PIPESTATUS[0]}} in 0|1|141) ;; *) exit 1 ;; esac
[ "$(stat --format=%s /tmp/snapshot)" -le {MAX_BYTES} ] || exit {_Exit.TOO_LARGE}
tar --extract --preserve-permissions --no-same-owner --file=/tmp/snapshot --directory="$1" || exit 1
rm /tmp/snapshot
"""


def grading_spec(agent: Sandbox) -> SandboxSpec:
    """Return the spec of the grading sandbox: that of the agent's sandbox, with its workspace mounted."""
    return SandboxSpec(
        workdir=agent.spec.workdir,
        env=agent.spec.env,
        mounts=(*agent.spec.mounts, workspace_mount(agent, _SUBMISSION)),
        masks=agent.spec.masks,
        limits=agent.spec.limits,
    )


async def copy_workspace(grader: SandboxSession) -> str:
    """Copy the submission into the grader's workspace.

    Returns:
        "" if the workspace was copied; otherwise the reason, caused by the agent, why it cannot be graded.

    Raises:
        GraderError: the copy failed for any other reason.
    """
    script = ["/bin/bash", "--noprofile", "--norc", "-c", _COPY, "copy", grader.sandbox.spec.workdir]
    try:
        done = await grader.tools.run(script, cwd="/", timeout_s=TIMEOUT_S)
    except OSError as error:
        raise GraderError(f"the workspace cannot be copied: {error}") from error
    text = done.output.decode(errors="replace")[:500]
    if done.exit_code == _Exit.COPIED:
        return ""
    if done.exit_code == _Exit.TOO_LARGE:
        return f"the workspace is larger than {MAX_BYTES} bytes"
    if done.exit_code == _Exit.REFUSED:
        return f"the workspace has an unreadable file or directory, or a path that is too long: {text}"
    raise GraderError(f"the workspace cannot be copied: {'timed out' if done.timed_out else text}")
