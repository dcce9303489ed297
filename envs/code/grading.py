"""Execution of a solution on its cases in a fresh sandbox, and comparison of the results.

Expected results never enter the sandbox in which the solution runs. The exception is test code, which runs in
the same sandbox, but in a process that the solution cannot access (see `runner.py`).
"""

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.env.scoring import CheckResult
from prorl_envs.envs.code.compare import same_output, same_result
from prorl_envs.envs.code.task import (
    SOLUTION,
    CodeTask,
    FunctionCase,
    FunctionTests,
    ScriptCase,
    ScriptTests,
    StdioCase,
    StdioTests,
)
from prorl_envs.envs.code.values import decode, encode
from prorl_envs.errors import GraderError, SandboxLimit
from prorl_envs.sandbox.base import SandboxLimits, SandboxSpec
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.types import Completed, JsonObject

type Case = StdioCase | FunctionCase | ScriptCase

#: Maximum bytes of a batch of cases, and of its results.
_BATCH_BYTES = 24 * 2**20
_RESULT_BYTES = 40 * 2**20
#: Maximum bytes of JSON text per byte of output.
_JSON_BYTES = 6
#: Maximum bytes of a case's output, in addition to four times the bytes of the expected output.
_SLACK_BYTES = 16 * 1024
#: Seconds to start the runner and to read the batch, in addition to the time of the cases.
_OVERHEAD_S = 30.0
_EVIDENCE_CHARS = 500
#: Maximum processes of a solution; and how many of them together may use the full memory limit of a process.
_PROCESSES, _PROCESSES_MEMORY = 128, 4
_ENV = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONINTMAXSTRDIGITS": "50000",  # as LiveCodeBench's; Python's own limit is 4,300 digits
}
_PYTHON = ("python3", "-s", "-P", "-c")

_CHECKER = """
import json, os, sys
verdicts = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # text that the checker prints, perhaps text of the solution, must not count as a verdict
given = json.load(sys.stdin)
names = {"__name__": "checker"}
exec(compile(given["checker"], "<checker>", "exec"), names)
print(json.dumps("ready"), file=verdicts, flush=True)
for case in given["cases"]:
    try:
        verdict = bool(names["check"](*case))
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps(verdict), file=verdicts, flush=True)
"""


async def run_cases(task: CodeTask, source: str, node: Node, spec: SandboxSpec) -> list[CheckResult]:
    """Return every case's verdict on a solution.

    Args:
        source: text of the solution; hostile.
        node: starts the sandboxes.
        spec: spec of the agent's sandbox; the grading sandboxes have other limits.

    Raises:
        GraderError: there is no verdict, and the solution is not the cause.
        SandboxError, ToolError: our infrastructure failed.
    """
    outcomes: list[JsonObject] = []
    remaining_s = task.limits.total_s
    memory = _PROCESSES_MEMORY * task.limits.memory_mb * 2**20 + 2**30
    spec = replace(spec, limits=SandboxLimits(memory_bytes=memory, processes=_PROCESSES, disk_bytes=2**31))
    async with sandbox_session(node, spec) as grader:
        await grader.tools.write(SOLUTION, source.encode("utf-8", "replace"))
        for batch in _batches(task):
            results = await _run_batch(task, source, batch, grader, remaining_s)
            outcomes += results
            remaining_s -= sum(float(result.get("seconds", 0.0)) for result in results)
            if len(results) < len(batch) or remaining_s <= 0:
                break
    verdicts = await asyncio.to_thread(_verdicts, task, outcomes)
    if isinstance(task.tests, StdioTests) and task.tests.checker:
        verdicts = await _checked(task.tests, outcomes, verdicts, node, spec)
    return [_result(number, verdict) for number, verdict in enumerate(verdicts, start=1)]


def _batches(task: CodeTask) -> Iterator[list[JsonObject]]:
    """Yield the cases in the runner's format, in batches; each batch, and its results, fit into a message."""
    batch: list[JsonObject] = []
    batch_bytes = result_bytes = 0
    for case in task.tests.cases:
        entry = _entry(task, case)
        size, max_result = len(json.dumps(entry)), _JSON_BYTES * entry["output"]
        if batch and (batch_bytes + size > _BATCH_BYTES or result_bytes + max_result > _RESULT_BYTES):
            yield batch
            batch, batch_bytes, result_bytes = [], 0, 0
        batch.append(entry)
        batch_bytes, result_bytes = batch_bytes + size, result_bytes + max_result
    yield batch


def _entry(task: CodeTask, case: Case) -> JsonObject:
    tests = task.tests
    match case, tests:
        case StdioCase(), _:
            return {"mode": "program", "entry": "", "input": case.input, "output": _max_output(case.output)}
        case FunctionCase(), FunctionTests():
            accepted = (case.expected, *case.alternatives)
            max_output = max(_max_output(json.dumps(encode(value))) for value in accepted)
            call = {"args": encode(list(case.args)), "kwargs": encode(case.kwargs)}
            return {"mode": "call", "entry": tests.entry_point, "output": max_output, **call}
        case ScriptCase(), ScriptTests():
            script = {"code": case.code, "prelude": tests.prelude, "names": tests.functions}
            return {"mode": "script", "entry": "", "output": _SLACK_BYTES, **script}
    raise AssertionError(f"{type(case)} in {type(tests)}")


def _max_output(expected: str) -> int:
    return 4 * len(expected.encode("utf-8", "replace")) + _SLACK_BYTES


async def _run_batch(
    task: CodeTask, source: str, cases: Sequence[JsonObject], grader: SandboxSession, total_s: float
) -> list[JsonObject]:
    """Return the runner's result of each case; fewer if the runner or the solution stopped early."""
    secret = secrets.token_hex(16)
    limits = task.limits
    batch = {
        "secret": secret,
        "source": source,
        "path": SOLUTION,
        "time_s": limits.time_s,
        "memory": limits.memory_mb * 2**20,
        "total_s": total_s,
        "stop_early": task.scoring == "all",
        "cases": cases,
    }
    try:
        done = await grader.tools.run(
            [*_PYTHON, runner_source()],
            env=_ENV,
            stdin=json.dumps(batch).encode(),
            timeout_s=total_s + _OVERHEAD_S,
            output_limit=_RESULT_BYTES + 2**20,
            apart=True,
        )
    except SandboxLimit as limit:  # the solution exceeded the limits of a sandbox
        return [{"status": "lost", "error": limit.message}]
    except OSError as error:
        raise GraderError(f"the runner cannot be started: {error}") from error
    return await asyncio.to_thread(_runner_results, done, secret)


def _runner_results(done: Completed, secret: str) -> list[JsonObject]:
    """Return the results if they carry the secret. Otherwise the solution killed the runner, since nothing
    else runs there; or the runner failed before the first case, which is our failure.

    Raises:
        GraderError: the runner failed before the first case.
    """
    try:
        answer = json.loads(done.output)
        if answer["secret"] == secret:
            results: list[JsonObject] = answer["results"]
            return results
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    if done.exit_code == 1 and b"Traceback" in done.errors and b"_run_all" not in done.errors:
        raise GraderError(f"the runner failed: {done.errors[-500:].decode(errors='replace')}")
    return [{"status": "lost", "error": "the solution ended the process that runs it"}]


def runner_source() -> str:
    """Return the program that runs cases, as one text."""
    folder = files("prorl_envs.envs.code")
    values, runner = (folder.joinpath(name).read_text("utf-8") for name in ("values.py", "runner.py"))
    values_import = "from prorl_envs.envs.code.values import NotPlain, decode, encode\n"
    return f"{values}\n{runner.replace(values_import, '')}"


def _verdicts(task: CodeTask, outcomes: Sequence[JsonObject]) -> list[JsonObject]:
    """Return one verdict per case: `passed`, and evidence. Cases that were not run count as not passed."""
    verdicts: list[JsonObject] = []
    cases: Sequence[Case] = task.tests.cases
    for case, outcome in zip(cases, outcomes, strict=False):
        if outcome["status"] == "unfit":
            raise GraderError(
                f"the tests pass a value to the solution that cannot be transferred: {outcome['error']}",
                hint="tests of this kind exchange plain values with the solution: see the family's README",
            )
        passed = outcome["status"] == "ok" and _is_right(task, case, str(outcome.get("output", "")))
        problem = "" if passed else "wrong" if outcome["status"] == "ok" else str(outcome["status"])
        shown: JsonObject = {key: outcome[key] for key in ("seconds", "memory", "exit") if key in outcome}
        if problem:
            text = outcome.get("error") or outcome.get("output") or ""
            shown |= {"problem": problem, "seen": str(text)[-_EVIDENCE_CHARS:]}
        verdicts.append({"passed": passed, **shown})
    missing = len(task.tests.cases) - len(verdicts)
    not_run: JsonObject = {"passed": False, "problem": "not run"}
    return verdicts + [not_run] * missing


def _is_right(task: CodeTask, case: Case, output: str) -> bool:
    tests = task.tests
    match case, tests:
        case StdioCase(), StdioTests():
            return bool(tests.checker) or same_output(output, case.output, tests)
        case FunctionCase(), FunctionTests():
            try:
                value: Any = decode(json.loads(output))
            except (ValueError, RecursionError):
                return False
            return same_result(value, case, tests)
    return True  # decided by the test code


async def _checked(
    tests: StdioTests,
    outcomes: Sequence[JsonObject],
    verdicts: Sequence[JsonObject],
    node: Node,
    spec: SandboxSpec,
) -> list[JsonObject]:
    """Apply the task's own checker to the cases that passed so far, and return all verdicts."""
    open_cases = [number for number, verdict in enumerate(verdicts) if verdict["passed"]]
    if not open_cases:
        return list(verdicts)
    triples = [
        (tests.cases[number].input, outcomes[number]["output"], tests.cases[number].output)
        for number in open_cases
    ]
    checker_verdicts = await _run_checker(tests.checker, triples, node, spec)
    result = list(verdicts)
    for index, number in enumerate(open_cases):
        verdict = checker_verdicts[index] if index < len(checker_verdicts) else "the checker ran too long"
        if verdict is not True:
            seen = verdict if isinstance(verdict, str) else str(outcomes[number]["output"])
            result[number] = {**verdicts[number], "passed": False, "problem": "wrong", "seen": seen[-500:]}
    return result


async def _run_checker(
    checker: str, triples: Sequence[tuple[str, str, str]], node: Node, spec: SandboxSpec
) -> list[Any]:
    """Return the checker's verdict on each case; fewer if it was too slow.

    Raises:
        GraderError: the checker does not start, or exits before the last case.
    """
    request = json.dumps({"checker": checker, "cases": triples}).encode()
    async with sandbox_session(node, spec) as session:
        done = await session.tools.run(
            [*_PYTHON, _CHECKER], env=_ENV, stdin=request, timeout_s=_OVERHEAD_S + len(triples), apart=True
        )
    lines = done.output.rstrip(b"\n").split(b"\n")
    if not done.output:
        raise GraderError(f"the checker failed: {done.errors[-500:].decode(errors='replace')}")
    # A hostile output can make a checker hang or crash, which fails the case. A normal exit is its own fault.
    if done.exit_code is not None and done.exit_code >= 0 and len(lines) <= len(triples):
        raise GraderError(
            "the checker ended before it judged every case",
            hint="check() must return true or false, and must not call sys.exit",
        )
    return [json.loads(line) for line in lines[1:] if line in (b"true", b"false") or line.endswith(b'"')]


def _result(number: int, verdict: JsonObject) -> CheckResult:
    detail = {key: value for key, value in verdict.items() if key != "passed"}
    return CheckResult(name=f"case-{number}", passed=verdict["passed"], detail=detail)
