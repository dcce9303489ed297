"""`prorl-envs replay`: scores stored rollouts again with the current graders."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.text import Text

from prorl_envs.app.compose import node, open_store
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.cli.output.fitted_table import plain_table
from prorl_envs.cli.sources import is_store
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.env.replay import Replayed, replay
from prorl_envs.errors import InputError, RolloutFailure
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result
from prorl_envs.rollout.client.result_files import GROUPS, lines_of, ready, results_file, write_results


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Outcome of scoring a result again.

    Args:
        result: the stored result.
        replayed: the new score; None if there is none.
        problem: reason why there is no new score.
    """

    result: Result
    replayed: Replayed | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        """`same`, `changed`, `new` (the stored result has no reward) or `failed` (there is no new reward)."""
        if self.replayed is None:
            return "failed"
        if self.result.reward is None:
            return "new"
        return "same" if self.result.reward == self.replayed.grade.reward else "changed"

    @property
    def differing(self) -> list[str]:
        """Names of the components of the grade that changed."""
        now = dict(self.replayed.grade.components) if self.replayed else {}
        before = self.result.components
        return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))

    @property
    def line(self) -> dict[str, Any]:
        """Summary of the outcome, for JSON."""
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
        """Return the result with the new reward, and the old reward in the metadata."""
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
        results: results that can be scored, in their order.
        rows: requests with task rows, by group.
        unfinished: one sentence for each result that cannot be scored.
        bad: problems of invalid lines.
    """

    results: list[Result] = field(default_factory=list)
    rows: dict[str, GroupRequest] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add a result, or record the reason why its agent loop did not finish."""
        if result.stop_reason is None:
            reason = result.failure.kind if result.failure else result.state
            self.unfinished.append(f"{result.job_id}: its agent loop did not finish ({reason})")
        else:
            self.results.append(result)


async def stored(source: str) -> Stored:
    """Read results of a JSONL file, with the `groups.jsonl` in the same folder; or of a service's store.

    Raises:
        InputError: the source cannot be read.
    """
    found = Stored()
    if is_store(source):
        async for result, request in _read_store(source):
            found.add(result)
            found.rows[request.id] = request
        return found
    path = results_file(source)
    for location, line in lines_of(path, Result.model_validate_json):
        if isinstance(line, Result):
            found.add(line)
        else:
            found.bad.append(f"{location}: {line}")
    groups = path.with_name(GROUPS)
    for location, group in lines_of(groups, GroupRequest.model_validate_json) if groups.is_file() else ():
        if isinstance(group, GroupRequest):
            found.rows[group.id] = group
        else:
            found.bad.append(f"{location}: {group}")
    return found


async def _read_store(source: str) -> AsyncIterator[tuple[Result, GroupRequest]]:
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
    """Lookup of the tasks of results: in a data file, or else in the stored requests, or in the examples.

    Args:
        catalog: the environments.
        rows: requests with task rows, by group.
        data: a data file with all tasks, or None.
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
            hint = "name the data file that contains the task: --data FILE"
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
        offered = [str(function.get("name")) for function in functions if isinstance(function, Mapping)]
        replayed = await replay(
            family(opened), task, result.messages, offered=offered, tool_timeout_s=seconds
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
        settings: settings of the environments and sandboxes.
        source: a JSONL file of results, or a service's store.
        data: data file with the tasks; None means the stored requests, or else the examples.
        target: file for the results with their new rewards; None writes no file.
        jobs: maximum episodes at a time.
        as_json: print JSON instead of a table.

    Returns:
        True if every line could be read, every result has a new reward, and no reward changed.

    Raises:
        InputError: the source cannot be read, or contains no result that can be scored.
    """
    path = ready(target) if target is not None else None
    found, catalog = await stored(source), Catalog.of(settings)
    if not found.results:
        problem = f"{source} contains no finished rollout" + "".join(
            f"\n{bad}" for bad in (found.bad + found.unfinished)[:5]
        )
        raise InputError(problem, hint="name a results.jsonl, or the store of a service")
    tasks, slots = Tasks(catalog, found.rows, data), asyncio.Semaphore(jobs)
    async with node(settings) as opened:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
            row = bar.add_task("scoring again", total=len(found.results))

            async def rescore_with_slot(result: Result) -> ReplayOutcome:
                async with slots:
                    outcome = await rescore(opened, catalog, tasks, found, result)
                bar.advance(row)
                return outcome

            async with asyncio.TaskGroup() as group:
                running = [group.create_task(rescore_with_slot(result)) for result in found.results]
    outcomes = [task.result() for task in running]
    if path is not None:
        write_results(path, (outcome.rescored() for outcome in outcomes if outcome.replayed is not None))
        err.print(f"results with the new rewards: {path}")
    if as_json:
        left_out = [*found.unfinished, *found.bad]
        print_json({"rollouts": [outcome.line for outcome in outcomes], "left_out": left_out})
    else:
        _show(outcomes, found)
    failed = any(outcome.verdict in ("changed", "failed") for outcome in outcomes)
    return not (failed or found.bad)


def _show(outcomes: Sequence[ReplayOutcome], found: Stored) -> None:
    numbers = ("was", "is", "observations")
    table = plain_table("job", *numbers, "differing", title="changes", numbers=numbers)
    for outcome in outcomes:
        if outcome.verdict != "same":
            table.add_row(*_cells(outcome))
    if table.row_count:
        out.print(table)
    left_out = [*found.unfinished, *found.bad]
    for problem in left_out:
        err.print(plain(f"left out: {problem}"), style="yellow")
    counts = Counter(outcome.verdict for outcome in outcomes)
    drifted = sum(outcome.replayed is not None and outcome.replayed.differing > 0 for outcome in outcomes)
    phrases = {
        "same": "the same",
        "changed": "changed",
        "new": "with a first reward",
        "failed": "without a new reward",
    }
    parts = [f"{counts[verdict]} {phrase}" for verdict, phrase in phrases.items() if counts[verdict]]
    out.print(f"{len(outcomes)} rollouts scored again: {', '.join(parts)}; {len(left_out)} left out")
    if drifted:
        out.print(f"in {drifted} of them, a tool call had another result than in the stored rollout")


def _cells(outcome: ReplayOutcome) -> tuple[Text, ...]:
    result, replayed = outcome.result, outcome.replayed
    before = "-" if result.reward is None else f"{result.reward:g}"
    if replayed is None:
        return plain(result.job_id), Text(before), Text("-"), Text("-"), plain(outcome.problem)
    now = Text(f"{replayed.grade.reward:g}", style="yellow")
    observations = f"{replayed.differing} of {replayed.calls} differ"
    return plain(result.job_id), Text(before), now, Text(observations), plain(", ".join(outcome.differing))
