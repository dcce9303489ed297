"""`prorl-envs replay`: stored rollouts, scored again by today's graders."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from prorl_envs.catalog import Catalog
from prorl_envs.cli.compose import node, open_store
from prorl_envs.cli.console import err, out, plain
from prorl_envs.cli.sources import is_store
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.env.replay import Replayed, replay
from prorl_envs.errors import InputError, RolloutFailure
from prorl_envs.rollout.result_files import GROUPS, lines_of, ready, write_results
from prorl_envs.rollout.types import GroupRequest, JobState, Result


@dataclass(frozen=True, slots=True)
class Outcome:
    """What scoring a result again came to.

    Args:
        result: as it is stored.
        replayed: None where there is no reward.
        problem: why.
    """

    result: Result
    replayed: Replayed | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        """same, changed, new (there was no reward), failed (there is none now)."""
        if self.replayed is None:
            return "failed"
        if self.result.reward is None:
            return "new"
        return "same" if self.result.reward == self.replayed.grade.reward else "changed"

    @property
    def differing(self) -> list[str]:
        """The components of the grade that are not what they were."""
        now = dict(self.replayed.grade.components) if self.replayed else {}
        before = self.result.components
        return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))

    def rescored(self) -> Result:
        """The result with the reward of today; the one that it had is in its metadata."""
        assert self.replayed is not None
        grade = self.replayed.grade
        before = {"reward": self.result.reward, "differing_observations": self.replayed.differing}
        trajectory = self.result.trajectory
        trainable = trajectory is not None and trajectory.exact and any(trajectory.loss_mask)
        changes = {
            "state": JobState.DONE,
            "reward": grade.reward,
            "components": dict(grade.components),
            "evidence": grade.evidence,
            "failure": None,
            "mask_sample": not trainable,
            "metadata": {**self.result.metadata, "replayed": before},
        }
        return self.result.model_copy(update=changes)


@dataclass
class Stored:
    """What is read of a source.

    Args:
        results: those that can be scored, in their order.
        rows: task rows by group.
        unfinished: why others have nothing to score, one sentence each.
        bad: what is wrong with the rest.
    """

    results: list[Result] = field(default_factory=list)
    rows: dict[str, GroupRequest] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Take a result, or say why not."""
        if result.stop_reason is None:
            why = result.failure.kind if result.failure else result.state
            self.unfinished.append(f"{result.job_id}: its agent loop did not end ({why})")
        else:
            self.results.append(result)


async def stored(source: str) -> Stored:
    """Read results: of a JSONL file, with the `groups.jsonl` beside it; or of a service's store.

    Raises:
        InputError: there is nothing that can be read.
    """
    found = Stored()
    if is_store(source):
        async for result, request in _of_store(source):
            found.add(result)
            found.rows[request.id] = request
        return found
    for where, line in lines_of(Path(source), Result):
        if isinstance(line, Result):
            found.add(line)
        else:
            found.bad.append(f"{where}: {line}")
    beside = Path(source).with_name(GROUPS)
    for where, asked in lines_of(beside, GroupRequest) if beside.is_file() else ():
        if isinstance(asked, GroupRequest):
            found.rows[asked.id] = asked
        else:
            found.bad.append(f"{where}: {asked}")
    return found


async def _of_store(source: str) -> AsyncIterator[tuple[Result, GroupRequest]]:
    store = open_store(ServiceSettings.model_validate({"store": source}))
    assert store is not None
    try:
        cursor = 0
        while page := await store.results(cursor, 100):
            for result in page:
                yield result, (await store.group(result.group_id)).request
            cursor = page[-1].cursor
    finally:
        await store.aclose()


class Tasks:
    """The rows that results were about: those asked for, those of a data file, those of the examples.

    Args:
        catalog: the environments.
        rows: by group.
        data: a data file of all of them.
    """

    def __init__(self, catalog: Catalog, rows: Mapping[str, GroupRequest], data: Path | None) -> None:
        self._catalog, self._rows, self._data = catalog, rows, data
        self._read: dict[str, dict[str, Any]] = {}

    def of(self, result: Result) -> Any:
        """The task of a result.

        Raises:
            InputError: it is not known.
        """
        if self._data is None and result.group_id in self._rows:
            return self._catalog.family(result.environment).load(self._rows[result.group_id].task)
        name = result.environment
        if name not in self._read:
            self._read[name] = {task.id: task for task in self._catalog.tasks(name, self._data)}
        if result.task_id not in self._read[name]:
            hint = "name the data that it was of: --data FILE"
            raise InputError(f"no task of {name} is called {result.task_id!r}", hint=hint)
        return self._read[name][result.task_id]


async def rescore(opened: Node, catalog: Catalog, tasks: Tasks, found: Stored, result: Result) -> Outcome:
    """Score one result again. Whatever is wrong with it is its outcome."""
    request = found.rows.get(result.group_id)
    try:
        family, task = catalog.family(result.environment), tasks.of(result)
        if reason := await asyncio.to_thread(family.unavailable, task):
            return Outcome(result, problem=reason)
        seconds = request.limits.tool_timeout_s if request else None
        functions = [tool.get("function") for tool in result.tools]
        offered = [str(one.get("name")) for one in functions if isinstance(one, Mapping)]
        replayed = await replay(
            family, opened, task, result.messages, offered=offered, tool_timeout_s=seconds
        )
        return Outcome(result, replayed)
    except InputError as error:
        return Outcome(result, problem=error.message + (f" ({error.hint})" if error.hint else ""))
    except RolloutFailure as failure:
        return Outcome(result, problem=f"{failure.kind}: {failure.message}")


async def replay_file(
    settings: Settings, source: str, *, data: Path | None, target: Path | None, jobs: int
) -> bool:
    """Score stored results again, show what changed.

    Args:
        settings: of the environments and sandboxes.
        source: a JSONL file of results, or a service's store.
        data: the tasks; None takes those that were asked for, else the examples.
        target: where the results go with their rewards of today; None: nowhere.
        jobs: most episodes at a time.

    Returns:
        whether every stored reward is what it was.

    Raises:
        InputError: the source cannot be read, or holds nothing to score.
    """
    path = ready(target) if target is not None else None
    found, catalog = await stored(source), Catalog.of(settings)
    if not found.results:
        problem = f"{source} holds no rollout that ended" + "".join(
            f"\n{bad}" for bad in (found.bad + found.unfinished)[:5]
        )
        raise InputError(problem, hint="a results.jsonl, or the store of a service")
    tasks, slots = Tasks(catalog, found.rows, data), asyncio.Semaphore(jobs)
    async with node(settings) as opened, catalog:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
            row = bar.add_task("scoring again", total=len(found.results))

            async def one(result: Result) -> Outcome:
                async with slots:
                    outcome = await rescore(opened, catalog, tasks, found, result)
                bar.advance(row)
                return outcome

            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(result)) for result in found.results]
    outcomes = [task.result() for task in running]
    if path is not None:
        write_results(path, (outcome.rescored() for outcome in outcomes if outcome.replayed is not None))
        err.print(f"with the rewards of today: {path}")
    return _show(outcomes, found)


def _show(outcomes: Sequence[Outcome], found: Stored) -> bool:
    table = Table(title="what changed", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("job", overflow="fold")
    table.add_column("was", justify="right")
    table.add_column("is", justify="right")
    table.add_column("observations", justify="right")
    table.add_column("differing", overflow="fold")
    for one in outcomes:
        if one.verdict != "same":
            table.add_row(*_cells(one))
    if table.row_count:
        out.print(table)
    left_out = [*found.unfinished, *found.bad]
    for problem in left_out:
        err.print(plain(f"left out: {problem}"), style="yellow")
    counts = Counter(one.verdict for one in outcomes)
    drifted = sum(one.replayed is not None and one.replayed.differing > 0 for one in outcomes)
    said = {
        "same": "the same",
        "changed": "changed",
        "new": "with a first reward",
        "failed": "without one now",
    }
    parts = [f"{counts[kind]} {words}" for kind, words in said.items() if counts[kind]]
    out.print(f"{len(outcomes)} rollouts scored again: {', '.join(parts)}; {len(left_out)} left out")
    if drifted:
        out.print(f"in {drifted} a tool gave something else than it did then")
    return not (counts["changed"] or counts["failed"] or found.bad)


def _cells(one: Outcome) -> tuple[Text, ...]:
    was = "-" if one.result.reward is None else f"{one.result.reward:g}"
    if one.replayed is None:
        return plain(one.result.job_id), Text(was), Text("-"), Text("-"), plain(one.problem)
    now = Text(f"{one.replayed.grade.reward:g}", style="yellow")
    seen = f"{one.replayed.differing} of {one.replayed.calls} differ"
    return plain(one.result.job_id), Text(was), now, Text(seen), plain(", ".join(one.differing))
