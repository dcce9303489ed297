"""Running a solution against its cases in a fresh sandbox, and judging what comes of it.

What is expected never enters the sandbox in which the solution runs, except where a task brings test code:
that runs beside the solution in a process which is closed to it (see `runner.py`).
"""

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import workplace
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
from prorl_envs.sandbox.base import Limits, SandboxSpec
from prorl_envs.tools.types import Completed, JsonObject
from prorl_envs.tools.workplace import Workplace

type Case = StdioCase | FunctionCase | ScriptCase

#: Most bytes that a batch is sent with, and that its results may take.
_BATCH_BYTES = 24 * 2**20
_RESULT_BYTES = 40 * 2**20
#: A JSON text may take so many bytes for one of the output.
_JSON_BYTES = 6
#: Bytes of output a case may have beyond four times the expected ones.
_SLACK_BYTES = 16 * 1024
#: Seconds for what surrounds the cases: the start of the runner, reading the batch.
_OVERHEAD_S = 30.0
_EVIDENCE_CHARS = 500
#: Processes a solution may have, and how many of them may use all the memory that one may.
_PROCESSES, _PROCESSES_MEMORY = 128, 4
_ENV = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
_PYTHON = ("python3", "-s", "-P", "-c")

_CHECKER = """
import json, sys
given = json.load(sys.stdin)
names = {"__name__": "checker"}
exec(compile(given["checker"], "<checker>", "exec"), names)
print(json.dumps("ready"), flush=True)
for case in given["cases"]:
    try:
        verdict = bool(names["check"](*case))
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps(verdict), flush=True)
"""


async def run_cases(task: CodeTask, source: str, node: Node, spec: SandboxSpec) -> list[CheckResult]:
    """Every case's verdict on a solution.

    Args:
        source: hostile.
        node: starts the sandboxes.
        spec: the agent's sandbox; the grading ones look the same.

    Raises:
        GraderError: there is no verdict, and the solution is not to blame.
        SandboxError, ToolError: our infrastructure failed.
    """
    outcomes: list[JsonObject] = []
    left = task.limits.total_s
    memory = _PROCESSES_MEMORY * task.limits.memory_mb * 2**20 + 2**30
    spec = replace(spec, limits=Limits(memory_bytes=memory, processes=_PROCESSES, disk_bytes=2**31))
    async with workplace(node, spec) as grader:
        await grader.tools.write(SOLUTION, source.encode("utf-8", "replace"))
        for batch in _batches(task):
            found = await _run_batch(task, source, batch, grader, left)
            outcomes += found
            left -= sum(float(outcome.get("seconds", 0.0)) for outcome in found)
            if len(found) < len(batch) or left <= 0:
                break
    verdicts = await asyncio.to_thread(_verdicts, task, outcomes)
    if isinstance(task.tests, StdioTests) and task.tests.checker:
        verdicts = await _checked(task.tests, outcomes, verdicts, node, spec)
    return [_result(number, verdict) for number, verdict in enumerate(verdicts, start=1)]


def _batches(task: CodeTask) -> Iterator[list[JsonObject]]:
    """The cases as the runner takes them, so many at a time as fit into one message each way."""
    batch: list[JsonObject] = []
    given = taken = 0
    for case in task.tests.cases:
        entry = _entry(task, case)
        size, results = len(json.dumps(entry)), _JSON_BYTES * entry["output"]
        if batch and (given + size > _BATCH_BYTES or taken + results > _RESULT_BYTES):
            yield batch
            batch, given, taken = [], 0, 0
        batch.append(entry)
        given, taken = given + size, taken + results
    yield batch


def _entry(task: CodeTask, case: Case) -> JsonObject:
    tests = task.tests
    match case, tests:
        case StdioCase(), _:
            return {"mode": "program", "entry": "", "input": case.input, "output": _room(case.output)}
        case FunctionCase(), FunctionTests():
            right = (case.expected, *case.alternatives)
            room = max(_room(json.dumps(encode(value))) for value in right)
            call = {"args": encode(list(case.args)), "kwargs": encode(case.kwargs)}
            return {"mode": "call", "entry": tests.entry_point, "output": room, **call}
        case ScriptCase(), ScriptTests():
            given = {"code": case.code, "prelude": tests.prelude, "names": tests.functions}
            return {"mode": "script", "entry": "", "output": _SLACK_BYTES, **given}
    raise AssertionError(f"{type(case)} in {type(tests)}")


def _room(expected: str) -> int:
    return 4 * len(expected.encode("utf-8", "replace")) + _SLACK_BYTES


async def _run_batch(
    task: CodeTask, source: str, cases: Sequence[JsonObject], grader: Workplace, total_s: float
) -> list[JsonObject]:
    """What the runner says of each case; shorter where it, or the solution, ended early."""
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
    except SandboxLimit as limit:  # the solution took more than a sandbox may
        return [{"status": "lost", "error": limit.message}]
    except OSError as error:
        raise GraderError(f"the runner cannot be started: {error}") from error
    return await asyncio.to_thread(_read, done, secret)


def _read(done: Completed, secret: str) -> list[JsonObject]:
    """The results, if they are the runner's own. One that ended without any was ended by the solution, as
    nothing else runs there; only a runner that says why it cannot run is our own failure."""
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
    """The program that runs cases, as one text."""
    folder = files("prorl_envs.envs.code")
    own = folder.joinpath("runner.py").read_text("utf-8")
    imported = "from prorl_envs.envs.code.values import NotPlain, decode, encode\n"
    return f"{folder.joinpath('values.py').read_text('utf-8')}\n{own.replace(imported, '')}"


def _verdicts(task: CodeTask, outcomes: Sequence[JsonObject]) -> list[JsonObject]:
    """One verdict per case: `passed`, and what to show of it. Cases that were not run have not passed."""
    verdicts: list[JsonObject] = []
    cases: Sequence[Case] = task.tests.cases
    for case, outcome in zip(cases, outcomes, strict=False):
        if outcome["status"] == "unfit":
            raise GraderError(
                f"the tests give the solution what does not travel: {outcome['error']}",
                hint="tests of this kind exchange plain values with the solution: see the family's README",
            )
        passed = outcome["status"] == "ok" and _right(task, case, str(outcome.get("output", "")))
        problem = "" if passed else "wrong" if outcome["status"] == "ok" else str(outcome["status"])
        shown: JsonObject = {key: outcome[key] for key in ("seconds", "memory", "exit") if key in outcome}
        if problem:
            text = outcome.get("error") or outcome.get("output") or ""
            shown |= {"problem": problem, "seen": str(text)[-_EVIDENCE_CHARS:]}
        verdicts.append({"passed": passed, **shown})
    missing = len(task.tests.cases) - len(verdicts)
    not_run: JsonObject = {"passed": False, "problem": "not run"}
    return verdicts + [not_run] * missing


def _right(task: CodeTask, case: Case, output: str) -> bool:
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
    return True  # test code has judged


async def _checked(
    tests: StdioTests,
    outcomes: Sequence[JsonObject],
    verdicts: Sequence[JsonObject],
    node: Node,
    spec: SandboxSpec,
) -> list[JsonObject]:
    """The verdicts, after the task's own checker had its say on those that passed so far."""
    open_cases = [number for number, verdict in enumerate(verdicts) if verdict["passed"]]
    if not open_cases:
        return list(verdicts)
    triples = [
        (tests.cases[number].input, outcomes[number]["output"], tests.cases[number].output)
        for number in open_cases
    ]
    said = await _run_checker(tests.checker, triples, node, spec)
    result = list(verdicts)
    for place, number in enumerate(open_cases):
        verdict = said[place] if place < len(said) else "the checker ran too long"
        if verdict is not True:
            seen = verdict if isinstance(verdict, str) else str(outcomes[number]["output"])
            result[number] = {**verdicts[number], "passed": False, "problem": "wrong", "seen": seen[-500:]}
    return result


async def _run_checker(
    checker: str, triples: Sequence[tuple[str, str, str]], node: Node, spec: SandboxSpec
) -> list[Any]:
    """What the checker says of each; shorter where it was too slow.

    Raises:
        GraderError: it does not start.
    """
    given = json.dumps({"checker": checker, "cases": triples}).encode()
    async with workplace(node, spec) as place:
        done = await place.tools.run(
            [*_PYTHON, _CHECKER], env=_ENV, stdin=given, timeout_s=_OVERHEAD_S + len(triples), apart=True
        )
    lines = done.output.splitlines()
    if not lines:
        raise GraderError(f"the checker failed: {done.errors[-500:].decode(errors='replace')}")
    return [json.loads(line) for line in lines[1:] if line in (b"true", b"false") or line.endswith(b'"')]


def _result(number: int, verdict: JsonObject) -> CheckResult:
    detail = {key: value for key, value in verdict.items() if key != "passed"}
    return CheckResult(name=f"case-{number}", passed=verdict["passed"], detail=detail)
