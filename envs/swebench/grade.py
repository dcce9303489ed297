"""Runs the record's script on a tree, and reads its log."""

import asyncio
import re

from prorl_envs.envs.swebench.foreign import parse
from prorl_envs.envs.swebench.logs import ScriptRun
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.tools.workplace import Workplace

#: The end of a log that is read; test output is at the end. It is hostile, and read in this process.
MAX_LOG_BYTES = 8 * 2**20
_TAIL_TIMEOUT_S = 60.0
_STATUS_MARKER = ">>>>> Test Exit Code:"


def script_for(task: SwebenchTask, commit: str) -> str:
    """The official script, with the commit's name replaced, and the test command's status printed.

    The status is taken where the newest version of the official harness takes it: before the end marker, so
    that it is the test command's, and printed after it, outside of what is parsed.
    """
    text = task.eval_script.replace(task.base_commit, commit) if task.base_commit else task.eval_script
    lines = text.split("\n")
    end = next(number for number, line in enumerate(lines) if END_MARKER in line)
    status = ("PRORL_TEST_STATUS=$?", lines[end], f'echo "{_STATUS_MARKER} $PRORL_TEST_STATUS"')
    return "\n".join((*lines[:end], *status, *lines[end + 1 :]))


async def run_tests(task: SwebenchTask, commit: str, grader: Workplace, *, timeout_s: float) -> ScriptRun:
    """Run the script in the grading sandbox, on whatever its tree is.

    Args:
        task: holds the script and names the parser.
        commit: the one commit of the repository at /testbed.
        grader: a fresh sandbox, used for nothing else.
        timeout_s: seconds that the script may take.

    Raises:
        GraderError: the row's log parser failed.
        OSError, SandboxError, ToolError: also where the tests end the sandbox or its tools, or leave it so
            that nothing can be started in it.
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
    """What a log of `script_for` says. Blocks: another package's parser is a process.

    Args:
        task: names the parser.
        log: may be cut off at its beginning, and lacks its end where the script did not come to it.
        timed_out: whether the script was stopped.
    """
    # The last of each marker: the log is the tested code's to write, but the end of it is the script's.
    before, _, after = log.rpartition(END_MARKER)
    tested = before.rpartition(START_MARKER)[2]
    status = re.search(rf"^{_STATUS_MARKER} (\d{{1,3}})$", after, re.MULTILINE)
    exit_code = int(status[1]) if status and not timed_out else None
    return ScriptRun(parse(task.log_parser, tested), exit_code, log)
