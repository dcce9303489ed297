"""Validation of data files without a model. Each task's untouched workspace must score 0, its reference
solution must score 1, and a second run of the reference must give the same verdict."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorl_envs.env.base import Environment, Grade, ReferenceCall, Task
from prorl_envs.env.conversation import MessageLog
from prorl_envs.env.node import Node
from prorl_envs.errors import RolloutFailure
from prorl_envs.tools.types import ToolCall

#: Maximum characters of what a failed check saw, in a problem.
_EVIDENCE_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationVerdict:
    """Result of validating one task.

    Args:
        task_id: id of the task.
        reference: reward of each run of the reference solution; empty if the task has none.
        untouched: reward of the workspace as it was prepared; None if grading it failed.
        problems: problems of the task, one sentence each.
        skipped: why this machine cannot run the task, or "".
        seconds: duration of the whole validation, all runs.
    """

    task_id: str
    reference: tuple[float, ...]
    untouched: float | None
    problems: tuple[str, ...]
    seconds: float
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """True if the task was validated and has no problem."""
        return not (self.problems or self.skipped)


async def play[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    task: TaskT,
    calls: Sequence[ReferenceCall],
    answer: str = "",
) -> tuple[Grade, list[str]]:
    """Run one whole episode with the given calls and last answer.

    Returns:
        the grade, and a sentence for each call that the tools refused.

    Raises:
        RolloutFailure: the episode failed.
    """
    refused = []
    async with family(node) as env:
        conversation = MessageLog(await env.init(task))
        for number, step in enumerate(calls, start=1):
            call = ToolCall(id=f"call-{number}", name=step.tool, arguments=dict(step.arguments))
            result = await env.call(call)
            conversation.called(call, result)
            if not result.ok:
                refused.append(f"reference call {number} ({step.tool}) was refused: {result.text[:200]}")
        if answer:
            conversation.said(answer)
        env.on_transcript(conversation.messages)
        return await env.eval(), refused


async def validate[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    tasks: Sequence[TaskT],
    *,
    concurrency: int = 4,
    repeats: int = 2,
    progress: Callable[[ValidationVerdict], None] | None = None,
) -> list[ValidationVerdict]:
    """Grade the untouched workspace and the reference solution of each task: see the module.

    Args:
        family: the environment class.
        node: where the episodes run.
        tasks: the tasks.
        concurrency: maximum number of concurrent episodes.
        repeats: runs of each reference; all runs must agree.
        progress: called with each verdict when it is ready.

    Returns:
        one verdict per task, in the tasks' order.
    """
    slots = asyncio.Semaphore(concurrency)

    async def validated(task: TaskT) -> ValidationVerdict:
        async with slots:
            verdict = await _validate_one(family, node, task, repeats)
        if progress is not None:
            progress(verdict)
        return verdict

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(validated(task)) for task in tasks]
    return [task.result() for task in running]


async def _validate_one[TaskT: Task](
    family: type[Environment[TaskT]], node: Node, task: TaskT, repeats: int
) -> ValidationVerdict:
    start = time.monotonic()
    if reason := await asyncio.to_thread(family.unavailable, task):
        return ValidationVerdict(
            task_id=task.id, reference=(), untouched=None, problems=(), seconds=0.0, skipped=reason
        )
    problems: list[str] = []
    untouched: float | None = None
    grades: list[Grade] = []
    try:
        grade, _ = await play(family, node, task, ())
        untouched = grade.reward
        for _ in range(repeats if task.reference or task.reference_answer else 0):
            grade, refused = await play(family, node, task, task.reference, task.reference_answer)
            grades.append(grade)
            problems += [problem for problem in refused if problem not in problems]
    except RolloutFailure as failure:
        problems.append(f"{failure.kind}: {failure}")
    else:
        problems += judge(untouched, grades)
    return ValidationVerdict(
        task_id=task.id,
        reference=tuple(grade.reward for grade in grades),
        untouched=untouched,
        problems=tuple(problems),
        seconds=time.monotonic() - start,
    )


def judge(untouched: float, grades: Sequence[Grade]) -> list[str]:
    """Return the problems that the rewards show. Pure."""
    problems = []
    if untouched != 0.0:
        problems.append(f"the untouched workspace scores {untouched:g}, not 0")
    if not grades:
        problems.append("there is no reference solution, so nothing shows that the task can be solved")
    elif grades[0].reward != 1.0:
        failed = ", ".join(name for name, value in grades[0].components.items() if value < 1.0)
        checks = [check for check in grades[0].evidence.get("checks", ()) if not check["passed"]]
        seen = f": {json.dumps(checks[0])[:_EVIDENCE_CHARS]}" if checks else ""
        problems.append(f"the reference scores {grades[0].reward:g}, not 1 (failed: {failed}){seen}")
    verdicts = {(grade.reward, tuple(sorted(grade.components.items()))) for grade in grades}
    if len(verdicts) > 1:
        problems.append("the reference scores differently from run to run")
    return problems
