"""Execution of a row's test script on a tree, and parsing of its log."""

import asyncio
import re

from prorl_envs.envs.swebench.failures import failed_condition, failed_tests
from prorl_envs.envs.swebench.foreign import parse
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.envs.swebench.verdict import FAILING, ScriptRun
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Maximum bytes read from the end of a log. A log is hostile, and parsed in this process.
MAX_LOG_BYTES = 8 * 2**20
_TAIL_TIMEOUT_S = 60.0
_STATUS_MARKER = ">>>>> Test Exit Code:"


def script_for(task: SwebenchTask, commit: str) -> str:
    """Return the official script, with the commit's name replaced and the test command's status printed.

    As in the newest version of the official harness, the status is read before the end marker, directly after
    the test command. It is printed after the marker, outside of the parsed part.
    """
    text = task.eval_script.replace(task.base_commit, commit) if task.base_commit else task.eval_script
    lines = text.split("\n")
    end = next(number for number, line in enumerate(lines) if END_MARKER in line)
    status = ("PRORL_TEST_STATUS=$?", lines[end], f'echo "{_STATUS_MARKER} $PRORL_TEST_STATUS"')
    return "\n".join((*lines[:end], *status, *lines[end + 1 :]))


async def run_tests(
    task: SwebenchTask, commit: str, grader: SandboxSession, *, timeout_s: float
) -> ScriptRun:
    """Run the script in the grading sandbox, on its current tree.

    Args:
        task: the task with the script and the name of the parser.
        commit: name of the only commit of the repository.
        grader: a fresh sandbox, used for nothing else.
        timeout_s: timeout of the script, in seconds.

    Raises:
        GraderError: the row's log parser failed.
        OSError, SandboxError, ToolError: our infrastructure failed, or the tests killed the sandbox or its
            tools, or left it in a state in which no process can start.
    """
    tools = grader.tools
    await tools.write("/tmp/eval.sh", script_for(task, commit).encode())
    command = ["/bin/bash", "-c", "exec /bin/bash /tmp/eval.sh > /tmp/eval.log 2>&1"]
    done = await tools.run(command, cwd=task.testbed, timeout_s=timeout_s)
    end = await tools.run(
        ["tail", "-c", str(MAX_LOG_BYTES), "/tmp/eval.log"],
        cwd="/",
        timeout_s=_TAIL_TIMEOUT_S,
        output_limit=MAX_LOG_BYTES,
    )
    log = end.output.decode(errors="replace")
    return await asyncio.to_thread(read_log, task, log, timed_out=done.timed_out)


def read_log(task: SwebenchTask, log: str, *, timed_out: bool = False) -> ScriptRun:
    """Parse a log of `script_for`. Blocks: another package's parser runs in a process.

    Args:
        task: the task with the name of the parser.
        log: the log; its start may be cut off, and its end is missing if the script did not finish.
        timed_out: whether the script was killed at its timeout.
    """
    # The last occurrence of each marker counts: the tested code can write markers to the log, but only before
    # the script writes the end of the log.
    before, _, after = log.rpartition(END_MARKER)
    tested = before.rpartition(START_MARKER)[2]
    status = re.search(rf"^{_STATUS_MARKER} (\d{{1,3}})$", after, re.MULTILINE)
    exit_code = int(status[1]) if status and not timed_out else None
    statuses = parse(task.log_parser, tested)
    not_failing = {test for test, status in statuses.items() if status not in FAILING}
    return ScriptRun(statuses, exit_code, log, failed_tests(tested, not_failing), failed_condition(tested))
