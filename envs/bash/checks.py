"""Execution of a task's checks in the grading sandbox."""

import json
from collections.abc import Callable, Sequence

from prorl_envs.env.answers import parse_number
from prorl_envs.env.scoring import CheckResult
from prorl_envs.env.task_files import contents
from prorl_envs.envs.bash.task import (
    Check,
    CommandCheck,
    FileAbsent,
    FileContains,
    FileEquals,
    FileJson,
    FileMatches,
    TestsCheck,
)
from prorl_envs.errors import GraderError
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.types import Completed, JsonObject

#: Maximum bytes of a file that a check reads, and of a command's output that it compares.
MAX_READ_BYTES = 4 * 2**20
#: Maximum characters of the agent's files and output in the evidence.
_EVIDENCE_CHARS = 2_000
_FILE_TIMEOUT_S = 30.0
#: Directory of the files of test code.
_TESTS = "/tests"
#: Directories that a grading sandbox for test code has in addition to the workspace.
TEST_DIRECTORIES = (_TESTS, "/logs/verifier")
#: A link of the agent to the tests' directories could pass for files that the tests expect.
_UNLINK = """
find . -type l -exec sh -c 'for link do
    case "$(readlink -m -- "$link")" in {0}|{0}/*|{1}|{1}/*) rm -f -- "$link" ;; esac
done' sh {{}} +
"""

type Outcome = tuple[bool, JsonObject]


async def run_check(name: str, check: Check, grader: SandboxSession) -> CheckResult:
    """Run one check.

    Raises:
        GraderError: the check itself cannot be run (its pattern is invalid, its shell did not start).
    """
    passed, detail = await _run(check, grader)
    share = detail.get("reward") if isinstance(check, TestsCheck) and check.reward else None
    detail = {"type": check.type, **detail}
    return CheckResult(name=name, passed=passed, weight=check.weight, share=share, detail=detail)


async def _run(check: Check, grader: SandboxSession) -> Outcome:
    match check:
        case CommandCheck():
            return await _command(check, grader)
        case FileMatches():
            return await _matches(check, grader)
        case FileAbsent():
            return await _absent(check, grader)
        case FileEquals():
            expected = check.text.rstrip()
            return await _content(check.path, grader, lambda text: text.rstrip() == expected)
        case FileContains():
            return await _content(check.path, grader, lambda text: all(part in text for part in check.texts))
        case TestsCheck():
            return await _tests(check, grader)
        case FileJson():
            return await _content(check.path, grader, lambda text: _same_json(text, check.value))


async def _command(check: CommandCheck, grader: SandboxSession) -> Outcome:
    shell = ["/bin/bash", "--noprofile", "--norc", "-c", check.command]
    # If the output is compared, stderr is not part of it.
    quiet = ["/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh"] if check.stdout is not None else []
    done = await _process(grader, [*quiet, *shell], check.timeout_s)
    # Background processes could write into the workspace, and into the output of later checks.
    await grader.tools.end_processes()
    output = done.output.decode(errors="replace")
    detail: JsonObject = {"exit_code": done.exit_code, "output": output[:_EVIDENCE_CHARS]}
    if done.timed_out:
        detail["timed_out"] = True
    if done.exit_code in (126, 127) and not output and check.exit_code == 0:
        detail["hint"] = "the command was not found or may not be run"
    same = check.stdout is None or (output.rstrip() == check.stdout.rstrip() and not done.truncated_bytes)
    return done.exit_code == check.exit_code and same, detail


async def _tests(check: TestsCheck, grader: SandboxSession) -> Outcome:
    """Write the tests, run them, and read their result.

    Raises:
        GraderError: the tests cannot be run, and report no reward.
    """
    unlink = ["/bin/sh", "-c", _UNLINK.format(*TEST_DIRECTORIES)]
    await _process(grader, unlink, _FILE_TIMEOUT_S)
    for path, content, executable in contents(check.files):
        await grader.tools.write(f"{_TESTS}/{path}", content, mode=0o755 if executable else 0o644)
    shell = ["/bin/bash", "--noprofile", "--norc", "-c", check.command]
    done = await _process(grader, shell, check.timeout_s)
    await grader.tools.end_processes()
    output = done.output.decode(errors="replace")
    detail: JsonObject = {"exit_code": done.exit_code, "output": output[-_EVIDENCE_CHARS:]}
    if done.timed_out:
        return False, {**detail, "timed_out": True}
    if check.reward is None:
        return done.exit_code == 0, detail
    try:
        report = (await grader.tools.read(check.reward, limit=100)).decode(errors="replace")
    except OSError:
        report = ""
    reward = parse_number(report)
    if reward is None and done.exit_code in (126, 127):
        raise GraderError(
            f"the tests cannot be run: {output[-500:]}", hint="install the programs that the tests call"
        )
    if reward is None or not 0 <= reward <= 1:
        return False, {**detail, "problem": f"no reward from 0 to 1 in {check.reward}"}
    return reward == 1.0, {**detail, "reward": reward}


async def _content(path: str, grader: SandboxSession, judge: Callable[[str], bool]) -> Outcome:
    """Read a file of the workspace and judge its text; a missing or over-long file fails."""
    try:
        content = await grader.tools.read(_absolute(path, grader), limit=MAX_READ_BYTES + 1)
    except OSError as error:
        return False, {"path": path, "problem": error.strerror}
    if len(content) > MAX_READ_BYTES:
        return False, {"path": path, "problem": f"longer than {MAX_READ_BYTES} bytes"}
    text = content.decode(errors="replace")
    return judge(text), {"path": path, "content": text[:_EVIDENCE_CHARS]}


async def _matches(check: FileMatches, grader: SandboxSession) -> Outcome:
    # grep runs in the sandbox: a slow pattern in Python's regular expressions would block the host.
    argv = ["grep", "--extended-regexp", "--quiet", "--regexp", check.pattern]
    readable, detail = await _content(check.path, grader, lambda text: True)
    if not readable:
        return False, detail
    done = await _process(grader, [*argv, "--", _absolute(check.path, grader)], _FILE_TIMEOUT_S)
    if done.exit_code not in (0, 1):
        raise GraderError(f"grep on {check.path}: {done.output.decode(errors='replace')[:500]}")
    return done.exit_code == 0, detail


async def _absent(check: FileAbsent, grader: SandboxSession) -> Outcome:
    argv = ["/bin/sh", "-c", '[ ! -e "$1" ] && [ ! -L "$1" ]', "sh", _absolute(check.path, grader)]
    done = await _process(grader, argv, _FILE_TIMEOUT_S)
    if done.exit_code not in (0, 1):
        raise GraderError(f"the check of {check.path} failed with exit status {done.exit_code}")
    return done.exit_code == 0, {"path": check.path}


async def _process(grader: SandboxSession, argv: Sequence[str], timeout_s: float) -> Completed:
    try:
        return await grader.tools.run(argv, timeout_s=timeout_s, output_limit=MAX_READ_BYTES)
    except OSError as error:
        raise GraderError(f"{argv[0]} cannot be started: {error}") from error


def _same_json(text: str, value: object) -> bool:
    try:
        return _same(json.loads(text), value)
    except (ValueError, RecursionError):
        return False


def _same(found: object, value: object) -> bool:
    """Compare JSON values. Unlike in Python, `true` is not 1."""
    if isinstance(found, dict) and isinstance(value, dict):
        return found.keys() == value.keys() and all(_same(found[key], value[key]) for key in value)
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(_same, found, value))
    return isinstance(found, bool) == isinstance(value, bool) and found == value


def _absolute(path: str, grader: SandboxSession) -> str:
    return f"{grader.sandbox.spec.workdir}/{path}"
