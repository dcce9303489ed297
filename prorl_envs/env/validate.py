"""Does a data file discriminate? Runs each task's reference (which must score 1), the untouched workspace
(which must score 0), and the reference again (which must give the same verdict), with no model at all."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorl_envs.env.base import Environment, Grade, ReferenceCall, Task
from prorl_envs.env.conversation import Conversation
from prorl_envs.env.node import Node
from prorl_envs.errors import RolloutFailure
from prorl_envs.tools.types import ToolCall

type Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What validating one task showed.

    Args:
        task_id: which task.
        reference: reward of the reference solution, per run; empty where the task has none.
        untouched: reward of the workspace as it was prepared; None where grading it failed.
        problems: what is wrong with the task, one sentence each.
        skipped: why this machine cannot run the task, or "".
        seconds: the whole validation, all runs.
    """

    task_id: str
    reference: tuple[float, ...]
    untouched: float | None
    problems: tuple[str, ...]
    seconds: float
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether the task was shown to discriminate."""
        return not (self.problems or self.skipped)


async def play[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    task: TaskT,
    calls: Sequence[ReferenceCall],
    answer: str = "",
) -> tuple[Grade, list[str]]:
    """Run one whole episode of given calls, and a given last answer.

    Returns:
        the grade, and a sentence for each call that the tools refused.

    Raises:
        RolloutFailure: the episode could not be carried through.
    """
    refused = []
    async with family(node) as env:
        conversation = Conversation(await env.init(task))
        for number, step in enumerate(calls, start=1):
            call = ToolCall(id=f"call-{number}", name=step.tool, arguments=dict(step.arguments))
            result = await env.call(call)
            conversation.called(call, result)
            if not result.ok:
                refused.append(f"reference call {number} ({step.tool}) was refused: {result.text[:200]}")
        if answer:
            conversation.said(answer)
        env.listen(conversation.messages)
        return await env.eval(), refused


async def validate[TaskT: Task](
    family: type[Environment[TaskT]],
    node: Node,
    tasks: Sequence[TaskT],
    *,
    concurrency: int = 4,
    repeats: int = 2,
    clock: Clock = time.monotonic,
    progress: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Validate tasks.

    Args:
        family: the environment class.
        node: where the episodes run.
        tasks: the tasks.
        concurrency: most episodes at a time.
        repeats: times each reference runs; all runs must agree.
        clock: seconds, monotonic.
        progress: told of each verdict as it comes.

    Returns:
        one verdict per task, in the tasks' order.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(task: TaskT) -> Verdict:
        async with slots:
            verdict = await _validate_one(family, node, task, repeats, clock)
        if progress is not None:
            progress(verdict)
        return verdict

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(task)) for task in tasks]
    return [task.result() for task in running]


async def _validate_one[TaskT: Task](
    family: type[Environment[TaskT]], node: Node, task: TaskT, repeats: int, clock: Clock
) -> Verdict:
    start = clock()
    if reason := await asyncio.to_thread(family.unavailable, task):
        return Verdict(
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
    return Verdict(
        task_id=task.id,
        reference=tuple(grade.reward for grade in grades),
        untouched=untouched,
        problems=tuple(problems),
        seconds=clock() - start,
    )


def judge(untouched: float, grades: Sequence[Grade]) -> list[str]:
    """What the rewards say about the task. Pure."""
    problems = []
    if untouched != 0.0:
        problems.append(f"the untouched workspace scores {untouched:g}, not 0")
    if not grades:
        problems.append("there is no reference solution, so nothing shows that the task can be solved")
    elif grades[0].reward != 1.0:
        failed = [name for name, value in grades[0].components.items() if value < 1.0]
        problems.append(f"the reference scores {grades[0].reward:g}, not 1 (failed: {', '.join(failed)})")
    verdicts = {(grade.reward, tuple(sorted(grade.components.items()))) for grade in grades}
    if len(verdicts) > 1:
        problems.append("the reference scores differently from run to run")
    return problems
