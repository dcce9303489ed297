"""`prorl-envs prepare`: preparation of a data file's tasks, which the first episode of each would do."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from prorl_envs.app.compose import node
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err, out, plain, print_by_reason, print_json
from prorl_envs.config import Settings
from prorl_envs.env.base import Environment, Task
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError, RolloutFailure


@dataclass(frozen=True, slots=True)
class Preparation:
    """Outcome of preparing one task.

    Args:
        task_id: id of the task.
        state: `done`, `was there` (nothing to do), `left out` (cannot run on this machine) or `failed`.
        why: reason why the task was left out or failed.
        seconds: duration in seconds.
    """

    task_id: str
    state: str
    why: str = ""
    seconds: float = 0.0


async def prepare_file(
    settings: Settings,
    environment: str,
    data: Path | None,
    jobs: int,
    *,
    allow_missing: bool = False,
    as_json: bool = False,
) -> bool:
    """Prepare the tasks of a data file, several at a time. Completed work is not repeated.

    Args:
        settings: all settings.
        environment: name of the environment.
        data: the data file; None means the environment's examples.
        jobs: maximum tasks at a time.
        allow_missing: whether to succeed even if some tasks cannot run on this machine.
        as_json: print JSON instead of a table.

    Returns:
        True if every task is prepared.

    Raises:
        InputError: no such environment, or a row is wrong.
    """
    catalog = Catalog.of(settings)
    family = catalog.family(environment)
    tasks = catalog.tasks(environment, data)
    if not tasks:
        raise InputError("the data file contains no task")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with node(settings) as opened:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
            results = await prepare(family, opened, tasks, jobs, progress)
    if as_json:
        print_json(results)
    else:
        out.print(_table(results))
        if failed := [(result.task_id, result.why) for result in results if result.state == "failed"]:
            print_by_reason("failed", failed, style="red", console=out)
            err.print(plain(f"the whole text of each failure: {_log_of(failed)}"))
    counts = {
        state: sum(r.state == state for r in results) for state in dict.fromkeys(r.state for r in results)
    }
    err.print(", ".join(f"{count} {state}" for state, count in counts.items()))
    left_out = [(result.task_id, result.why) for result in results if result.state == "left out"]
    print_by_reason("left out", left_out, style="yellow")
    return "failed" not in counts and (allow_missing or "left out" not in counts)


async def prepare(
    family: type[Environment[Any]], opened: Node, tasks: Sequence[Task], jobs: int, progress: Progress
) -> list[Preparation]:
    """Prepare tasks; a failed task does not stop the others. Return outcomes in the order of the tasks.

    Args:
        progress: shows a line per running task; without a terminal, a line per finished task is printed.
    """
    slots, overall = asyncio.Semaphore(jobs), progress.add_task("preparing", total=len(tasks))
    numbers = itertools.count(1)

    async def prepare_with_slot(task: Task) -> Preparation:
        async with slots:
            name = f"  {plain(task.id)}"
            row = progress.add_task(name, total=None, visible=False)

            def show(line: str) -> None:
                progress.update(row, description=f"{name}: {plain(line)}", visible=True)

            result = await _prepare_one(family, opened, task, show)
            progress.remove_task(row)
            progress.advance(overall)
            number = next(numbers)
            if not err.is_terminal and result.state != "was there":
                detail = "" if result.why else f" in {result.seconds:.0f} s"
                err.print(plain(f"{number}/{len(tasks)} {result.task_id} {result.state}{detail}"))
            return result

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(prepare_with_slot(task)) for task in tasks]
    return [task.result() for task in running]


async def _prepare_one(
    family: type[Environment[Any]], opened: Node, task: Task, show: Callable[[str], None]
) -> Preparation:
    started = time.monotonic()
    if reason := await asyncio.to_thread(family.obstacle, task, opened.driver.name):
        return Preparation(task.id, "left out", reason)
    steps: list[str] = []

    def progress(line: str) -> None:
        steps.append(line)
        show(line)

    try:
        await family.provision(opened, task, progress)
    except (RolloutFailure, InputError) as error:
        return Preparation(task.id, "failed", str(error), time.monotonic() - started)
    return Preparation(task.id, "done" if steps else "was there", seconds=time.monotonic() - started)


_STYLES = {"done": "green", "was there": "green", "left out": "yellow", "failed": "red"}


def _table(results: Sequence[Preparation]) -> Table:
    table = Table(title="prepared", title_justify="left")
    table.add_column("task", overflow="fold")
    table.add_column("seconds", justify="right")
    table.add_column("outcome", overflow="fold")
    for result in results:
        outcome = Text(result.state, style=_STYLES[result.state])
        table.add_row(plain(result.task_id), f"{result.seconds:.1f}", outcome)
    return table


def _log_of(failed: Sequence[tuple[str, str]]) -> str:
    """Return the path of a new file with the whole errors."""
    with tempfile.NamedTemporaryFile(
        "w", errors="replace", prefix="prorl-prepare-", suffix=".log", delete=False
    ) as file:
        file.writelines(f"{task_id}: {why}\n\n" for task_id, why in failed)
    return file.name
