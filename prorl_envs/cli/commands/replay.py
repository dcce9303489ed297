"""`prorl-envs replay`: stored rollouts, scored again with the current graders."""

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

from prorl_envs.app.compose import node, open_store
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.cli.sources import is_store
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.env.replay import Replayed, replay
from prorl_envs.errors import InputError, RolloutFailure
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result, parse_result
from prorl_envs.rollout.client.result_files import GROUPS, lines_of, ready, results_file, write_results


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of scoring a result again.

    Args:
        result: as it is stored.
        replayed: the new score; None if there is no reward.
        problem: why there is none.
    """

    result: Result
    replayed: Replayed | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        """Verdict: same, changed, new (there was no reward) or failed (there is none now)."""
        if self.replayed is None:
            return "failed"
        if self.result.reward is None:
            return "new"
        return "same" if self.result.reward == self.replayed.grade.reward else "changed"

    @property
    def differing(self) -> list[str]:
        """Components of the grade that changed."""
        now = dict(self.replayed.grade.components) if self.replayed else {}
        before = self.result.components
        return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))

    @property
    def line(self) -> dict[str, Any]:
        """Outcome in short, for JSON."""
        now = self.replayed
        return {
            "job_id": self.result.job_id,
            "verdict": self.verdict,
            "was": self.result.reward,
            "is": now.grade.reward if now else None,
            "differing_components": self.differing if now else [],
            "calls": now.calls if now else None,
            "differing_observations": now.differing if now else None,
            "problem": self.problem,
        }

    def rescored(self) -> Result:
        """Return the result with the new reward; its metadata has the old one."""
        assert self.replayed is not None
        grade = self.replayed.grade
        before = {"reward": self.result.reward, "differing_observations": self.replayed.differing}
        trajectory = self.result.trajectory
        trainable = trajectory is not None and trajectory.token_exact and any(trajectory.loss_mask)
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
    """Results and task rows read from a source.

    Args:
        results: those that can be scored, in their order.
        rows: task rows by group.
        unfinished: why other results have nothing to score, one sentence each.
        bad: problems of invalid lines.
    """

    results: list[Result] = field(default_factory=list)
    rows: dict[str, GroupRequest] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add a result, or record the reason if its agent loop did not finish."""
        if result.stop_reason is None:
            why = result.failure.kind if result.failure else result.state
            self.unfinished.append(f"{result.job_id}: its agent loop did not end ({why})")
        else:
            self.results.append(result)


async def stored(source: str) -> Stored:
    """Read results of a JSONL file, with the `groups.jsonl` beside it; or of a service's store.

    Raises:
        InputError: the source cannot be read.
    """
    found = Stored()
    if is_store(source):
        async for result, request in _of_store(source):
            found.add(result)
            found.rows[request.id] = request
        return found
    path = results_file(source)
    for where, line in lines_of(path, parse_result):
        if isinstance(line, Result):
            found.add(line)
        else:
            found.bad.append(f"{where}: {line}")
    beside = path.with_name(GROUPS)
    for where, asked in lines_of(beside, GroupRequest.model_validate_json) if beside.is_file() else ():
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
    """Tasks of results: from the stored requests, a data file, or the examples.

    Args:
        catalog: the environments.
        rows: by group.
        data: a data file with all tasks.
    """

    def __init__(self, catalog: Catalog, rows: Mapping[str, GroupRequest], data: Path | None) -> None:
        self._catalog, self._rows, self._data = catalog, rows, data
        self._read: dict[str, dict[str, Any]] = {}

    def of(self, result: Result) -> Any:
        """Return the task of a result.

        Raises:
            InputError: the task is unknown.
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


async def rescore(
    opened: Node, catalog: Catalog, tasks: Tasks, found: Stored, result: Result
) -> ReplayOutcome:
    """Score one result again. Return any error as its outcome."""
    request = found.rows.get(result.group_id)
    try:
        family, task = catalog.family(result.environment), tasks.of(result)
        if reason := await asyncio.to_thread(family.unavailable, task):
            return ReplayOutcome(result, problem=reason)
        seconds = request.limits.tool_timeout_s if request else None
        functions = [tool.get("function") for tool in result.tools]
        offered = [str(one.get("name")) for one in functions if isinstance(one, Mapping)]
        replayed = await replay(
            family, opened, task, result.messages, offered=offered, tool_timeout_s=seconds
        )
        return ReplayOutcome(result, replayed)
    except InputError as error:
        return ReplayOutcome(result, problem=error.message + (f" ({error.hint})" if error.hint else ""))
    except RolloutFailure as failure:
        return ReplayOutcome(result, problem=f"{failure.kind}: {failure.message}")


async def replay_file(
    settings: Settings,
    source: str,
    *,
    data: Path | None,
    target: Path | None,
    jobs: int,
    as_json: bool = False,
) -> bool:
    """Score stored results again and show the changes.

    Args:
        settings: of the environments and sandboxes.
        source: a JSONL file of results, or a service's store.
        data: the tasks; None takes the stored requests, else the examples.
        target: file for the results with their new rewards; None writes none.
        jobs: most episodes at a time.
        as_json: print JSON instead of a table.

    Returns:
        whether no reward changed or failed, and every line could be read.

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

            async def one(result: Result) -> ReplayOutcome:
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
    if as_json:
        left_out = [*found.unfinished, *found.bad]
        print_json({"rollouts": [one.line for one in outcomes], "left_out": left_out})
    else:
        _show(outcomes, found)
    failed = any(one.verdict in ("changed", "failed") for one in outcomes)
    return not (failed or found.bad)


def _show(outcomes: Sequence[ReplayOutcome], found: Stored) -> None:
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


def _cells(one: ReplayOutcome) -> tuple[Text, ...]:
    was = "-" if one.result.reward is None else f"{one.result.reward:g}"
    if one.replayed is None:
        return plain(one.result.job_id), Text(was), Text("-"), Text("-"), plain(one.problem)
    now = Text(f"{one.replayed.grade.reward:g}", style="yellow")
    seen = f"{one.replayed.differing} of {one.replayed.calls} differ"
    return plain(one.result.job_id), Text(was), now, Text(seen), plain(", ".join(one.differing))
