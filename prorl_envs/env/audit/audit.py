"""Audit of a task set: each task is played in several ways that must score 1, or must not."""

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from prorl_envs.env.audit.duplicates import Resemblance, resemblances
from prorl_envs.env.audit.episodes import PlayedEpisode, Step, play
from prorl_envs.env.audit.findings import AuditFinding, FindingKind, Severity
from prorl_envs.env.audit.probes import PROBE_NAMES, AuditProbe, answering, probes, right_answer
from prorl_envs.env.audit.searches import SEARCH, search_sandbox
from prorl_envs.env.base import Environment, Grade, Task
from prorl_envs.env.node import Node
from prorl_envs.errors import RolloutFailure, SandboxError, ToolError

#: Names of the episodes that are always played, and of a probe.
UNTOUCHED, REFERENCE, BUSY = "untouched", "reference", "busy"
PROBES = (*PROBE_NAMES, SEARCH, BUSY)
#: Kinds of findings that depend on other tasks.
_OF_THE_SET = frozenset({FindingKind.DUPLICATE, FindingKind.CONTRADICTION, FindingKind.GUESSABLE_SET})
#: Share of a set's tasks above which the answer that solves them is a finding; share of tasks with the same
#: right answer that makes it worth trying; minimum size of the set.
_GUESSED_SHARE, _TRIED_SHARE, _FEWEST = 0.5, 0.1, 10
#: Maximum characters of what a failed check saw.
_EVIDENCE_CHARS = 300
_TIMED_OUT = re.compile(r'"timed_out": true|timed?[ _-]?out|time limit', re.IGNORECASE)
_NO_NETWORK = re.compile(
    r"could not resolve|name resolution|name or service not known|network is unreachable|no route to host"
    r"|getaddrinfo|ENOTFOUND|EAI_AGAIN|failed to establish a new connection|unable to access 'https?:"
    r"|failed to connect to|connection refused",
    re.IGNORECASE,
)
#: Programs that keep each processor busy, beside the sandboxes; they have the nice value of these.
_BUSY_PER_PROCESSOR = 2
_SPIN = "import os\nos.nice(10)\nwhile True: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAudit:
    """Result of auditing one task.

    Args:
        task_id: id of the task.
        reference: reward of each run of the reference solution; empty if the task has none.
        untouched: reward of the workspace as it was prepared; None if grading it failed.
        findings: what is wrong with the task.
        seconds: duration of all its episodes.
        skipped: why this machine cannot run the task, or "".
    """

    task_id: str
    reference: tuple[float, ...] = ()
    untouched: float | None = None
    findings: tuple[AuditFinding, ...] = ()
    seconds: float = 0.0
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """True if an episode failed, so that the task was not audited to the end."""
        return any(found.kind is FindingKind.BROKEN for found in self.findings)

    @property
    def ok(self) -> bool:
        """True if the task was audited and nothing makes its rewards wrong."""
        return not self.skipped and all(found.severity is not Severity.ERROR for found in self.findings)


async def audit[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    tasks: Sequence[TaskT],
    *,
    quick: bool = False,
    only: Collection[str] = (),
    against: Sequence[TaskT] = (),
    concurrency: int = 4,
    repeats: int = 2,
    done: Mapping[str, TaskAudit] | None = None,
    progress: Callable[[TaskAudit], None] | None = None,
) -> list[TaskAudit]:
    """Audit tasks.

    Args:
        family: the environment class.
        node: where the episodes run.
        tasks: the tasks.
        quick: play only the untouched workspace and the reference.
        only: names of the only probes to play; all by default.
        against: tasks of a second set, such as a held-out one, that `tasks` must not repeat.
        concurrency: maximum number of concurrent episodes.
        repeats: runs of each reference; all runs must agree.
        done: results of an interrupted audit by task id; these tasks are not played again.
        progress: called with the result of each task when its episodes are over.

    Returns:
        one result per task, in the tasks' order.
    """
    auditor = _Auditor(family, node, quick=quick, only=only, repeats=repeats, concurrency=concurrency)

    async def audited(task: TaskT) -> TaskAudit:
        if done and task.id in done:
            own = tuple(found for found in done[task.id].findings if found.kind not in _OF_THE_SET)
            return replace(done[task.id], findings=own)
        async with auditor.slots:
            result = await auditor.task(task)
        if progress is not None:
            progress(result)
        return result

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(audited(task)) for task in tasks]
    results = {task.id: running.result() for task, running in zip(tasks, running, strict=True)}
    if not quick and not only:
        of_set = [
            (found.task, await auditor.resemblance(found)) for found in resemblances(family, tasks, against)
        ]
        for task, finding in (*of_set, *await auditor.guesses(tasks)):
            result = results[task.id]
            results[task.id] = replace(result, findings=(*result.findings, finding))
    return [results[task.id] for task in tasks]


async def validate[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    tasks: Sequence[TaskT],
    *,
    concurrency: int = 4,
    repeats: int = 2,
) -> list[TaskAudit]:
    """Play the untouched workspace and the reference of each task: the quick part of `audit`."""
    return await audit(family, node, tasks, quick=True, concurrency=concurrency, repeats=repeats)


class _Auditor[TaskT: Task]:
    """Audits one task at a time; see `audit` for the arguments."""

    def __init__(
        self,
        family: type[Environment[TaskT]],
        node: Node,
        *,
        quick: bool,
        only: Collection[str],
        repeats: int,
        concurrency: int,
    ) -> None:
        self._family = family
        self._node = node
        self._quick = quick
        self._probes = frozenset(only or PROBES)
        self._repeats = repeats
        self.slots = asyncio.Semaphore(concurrency)
        self._busy = _BusyMachine()

    async def task(self, task: TaskT) -> TaskAudit:
        started = time.monotonic()
        if reason := await asyncio.to_thread(self._family.unavailable, task):
            return TaskAudit(task_id=task.id, skipped=reason)
        findings: list[AuditFinding] = []
        references: list[PlayedEpisode] = []
        untouched: float | None = None
        episode = UNTOUCHED
        try:
            untouched = (await self._play(task)).grade.reward
            if untouched != 0.0:
                text = f"the untouched workspace scores {untouched:g}, not 0"
                findings.append(AuditFinding(kind=FindingKind.VACUOUS, text=text, probe=UNTOUCHED))
            episode = REFERENCE
            runs = self._repeats if _has_reference(task) else 0
            references += [await self._reference(task) for _ in range(runs)]
            findings += judge(references)
            episode = ""
            if not self._quick:
                findings += [found async for found in self._probed(task, untouched, references)]
        except RolloutFailure as failure:
            text = f"{failure.kind}: {failure}"
            findings.append(AuditFinding(kind=FindingKind.BROKEN, text=text, probe=episode))
        return TaskAudit(
            task_id=task.id,
            reference=tuple(played.grade.reward for played in references),
            untouched=untouched,
            findings=tuple(findings),
            seconds=time.monotonic() - started,
        )

    async def resemblance(self, found: Resemblance[TaskT]) -> AuditFinding:
        """Return the finding for a task that resembles another one, whose reference is tried on it."""
        if found.same and not found.graded_alike and _has_reference(found.other):
            with contextlib.suppress(RolloutFailure):
                played = await self._play(found.task, found.other.reference, found.other.reference_answer)
                if played.grade.reward < 1.0:
                    text = (
                        f"{found.name} asks the same, and its reference scores {played.grade.reward:g} here"
                    )
                    return AuditFinding(kind=FindingKind.CONTRADICTION, text=text)
        nearly = "" if found.same else "nearly "
        return AuditFinding(kind=FindingKind.DUPLICATE, text=f"{nearly}the same task as {found.name}")

    async def guesses(self, tasks: Sequence[TaskT]) -> list[tuple[TaskT, AuditFinding]]:
        """Return a finding for each task that one answer solves, if it solves most of those with answers."""
        right = {task.id: answer for task in tasks if (answer := right_answer(self._family, task))}

        async def solves(task: TaskT, guess: str) -> bool:
            probe = answering(self._family, task, "guess", guess)
            async with self.slots:
                grade = right[task.id] != guess and probe and await self._cheated(task, probe)
            return right[task.id] == guess or bool(grade and grade.reward == 1.0)

        answered = [task for task in tasks if task.id in right]
        for guess, count in Counter(right.values()).most_common():
            if len(right) < _FEWEST or count < _TRIED_SHARE * len(right):
                break
            solved = await asyncio.gather(*(solves(task, guess) for task in answered))
            if sum(solved) > _GUESSED_SHARE * len(right):
                text = f"{guess[:40]!r} solves {sum(solved):,} of the set's {len(right):,} questions"
                finding = AuditFinding(kind=FindingKind.GUESSABLE_SET, text=text)
                return [(task, finding) for task in compress(answered, solved)]
        return []

    async def _probed(
        self, task: TaskT, untouched: float, references: Sequence[PlayedEpisode]
    ) -> AsyncIterator[AuditFinding]:
        for probe in probes(self._family, task, task.instruction):
            if probe.name in self._probes:
                grade = await self._cheated(task, probe)
                if grade is not None and grade.reward > untouched:
                    text = f"{probe.what} scores {grade.reward:g}"
                    yield AuditFinding(
                        kind=probe.kind, text=text, probe=probe.name, evidence=dict(grade.evidence)
                    )
        if SEARCH in self._probes:
            for finding in await search_sandbox(self._family, self._node, task):
                yield finding
        if references and references[0].grade.reward == 1.0 and BUSY in self._probes:
            async with self._busy:
                grade = (await self._reference(task)).grade
            if _verdict(grade) != _verdict(references[0].grade):
                kind = FindingKind.TIMEOUT_EDGE if _timed_out(grade) else FindingKind.FLAKY
                text = f"on a busy machine, the reference scores {grade.reward:g}{_seen(grade)}"
                yield AuditFinding(kind=kind, text=text, probe=BUSY, evidence=dict(grade.evidence))

    async def _cheated(self, task: TaskT, probe: AuditProbe) -> Grade | None:
        """Play a probe. Return None if there was nothing to do, or if its files made the grader fail."""

        async def cheat(env: Environment[Any]) -> None:
            if probe.script and not await env.examine(probe.script):
                raise _NothingToDo

        try:
            return (await self._play(task, probe.calls, probe.answer, before=cheat)).grade
        except (_NothingToDo, RolloutFailure):
            return None

    async def _play(self, task: TaskT, *calls_and_answer: Any, before: Step | None = None) -> PlayedEpisode:
        """Play an episode, and again if this machine failed: see `play`."""
        try:
            return await play(self._family, self._node, task, *calls_and_answer, before=before)
        except (SandboxError, ToolError):
            return await play(self._family, self._node, task, *calls_and_answer, before=before)

    async def _reference(self, task: TaskT) -> PlayedEpisode:
        return await self._play(task, task.reference, task.reference_answer)


class _NothingToDo(Exception):
    """A cheat finds nothing to change in the sandbox."""


def _has_reference(task: Task) -> bool:
    return bool(task.reference or task.reference_answer)


def judge(references: Sequence[PlayedEpisode]) -> list[AuditFinding]:
    """Return the findings that the runs of the reference show. Pure."""
    if not references:
        text = "there is no reference solution, so nothing shows that the task can be solved"
        return [AuditFinding(kind=FindingKind.NO_REFERENCE, text=text)]
    refused = dict.fromkeys(text for played in references for text in played.refused)
    findings = [AuditFinding(kind=FindingKind.REFUSED_CALL, text=text, probe=REFERENCE) for text in refused]
    first, grades = references[0].grade, [played.grade for played in references]
    if first.reward != 1.0:
        failed = ", ".join(name for name, value in first.components.items() if value < 1.0)
        text = f"the reference scores {first.reward:g}, not 1 (failed: {failed}){_seen(first)}"
        kind = FindingKind.TIMEOUT_EDGE if _timed_out(first) else FindingKind.UNSOLVABLE
        if _NO_NETWORK.search("\n".join([*references[0].outputs, json.dumps(first.evidence)])):
            kind = FindingKind.HIDDEN_NETWORK
        findings.append(AuditFinding(kind=kind, text=text, probe=REFERENCE, evidence=dict(first.evidence)))
    if len(set(map(_verdict, grades))) > 1:
        text = "the reference scores differently from run to run"
        rewards = [grade.reward for grade in grades]
        findings.append(
            AuditFinding(kind=FindingKind.FLAKY, text=text, probe=REFERENCE, evidence={"rewards": rewards})
        )
    return findings


def _timed_out(grade: Grade) -> bool:
    return _TIMED_OUT.search(json.dumps(grade.evidence)) is not None


def _verdict(grade: Grade) -> tuple[Any, ...]:
    return grade.reward, tuple(sorted(grade.components.items()))


def _seen(grade: Grade) -> str:
    """Return the evidence of the first failed check, for a sentence; "" if the evidence has no checks."""
    checks = [check for check in grade.evidence.get("checks", ()) if not check["passed"]]
    return f": {json.dumps(checks[0])[:_EVIDENCE_CHARS]}" if checks else ""


class _BusyMachine:
    """Context manager that keeps all processors busy; blocks that overlap share the load."""

    def __init__(self) -> None:
        self._blocks = 0
        self._programs: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> None:
        self._blocks += 1
        if self._blocks == 1:
            for _ in range(_BUSY_PER_PROCESSOR * len(os.sched_getaffinity(0))):
                self._programs.append(await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", _SPIN))

    async def __aexit__(self, *exc_info: object) -> None:
        self._blocks -= 1
        while self._blocks == 0 and self._programs:
            program = self._programs.pop()
            program.kill()
            await program.wait()
