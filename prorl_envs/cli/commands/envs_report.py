"""`prorl-envs envs` and `prorl-envs tasks`: the environments of the configuration, and their tasks."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from prorl_envs.catalog import Catalog, entries
from prorl_envs.cli.output.console import err, out, plain, print_json, print_json_lines
from prorl_envs.cli.output.fitted_table import plain_table
from prorl_envs.config import Settings
from prorl_envs.env.base import Task
from prorl_envs.env.directories import is_task_directory
from prorl_envs.env.harness.family import harness_of
from prorl_envs.env.harness.install import missing
from prorl_envs.env.node import default_cache_dir
from prorl_envs.env.registry import Family, description_of, examples_of, is_built_in
from prorl_envs.env.rows import read_tasks
from prorl_envs.errors import InputError, NoExampleData
from prorl_envs.remote.environment import NemoEnvironment

#: Maximum columns of an instruction in the table of tasks.
_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSummary:
    """Environment, and whether this machine can run it.

    Args:
        name: name of the environment in commands and requests.
        kind: `built-in`; `package` (of an installed package); or `nemo-gym` (a NeMo Gym resources server).
        family: the registered family of the environment; "" for `nemo-gym`.
        harness: harness that works on the tasks; "" for the service's own agent loop.
        tasks: number of example tasks; None if there are no examples.
        runnable: number of example tasks that this machine can run; None if unknown.
        usable: whether this machine can run the environment; None if unknown before its server starts.
        problem: reason why the environment is not usable, or why the first task that cannot run cannot; "" if
            there is no problem.
        description: description in one line.
    """

    name: str
    kind: str
    family: str
    harness: str = ""
    tasks: int | None = None
    runnable: int | None = None
    usable: bool | None = None
    problem: str = ""
    description: str = ""


def summarise_environments(settings: Settings) -> list[EnvironmentSummary]:
    """Summarise every environment of the configuration. Reads example tasks and checks requirements; blocks.

    Raises:
        InputError: the configuration is wrong.
    """
    catalog, cache = Catalog.of(settings), settings.cache_dir or default_cache_dir()
    families = {entry.name: entry.settings.family or entry.environment for entry in entries(settings)}
    return [
        _summarise(catalog, name, families.get(name, name), cache, settings.driver)
        for name in sorted(catalog)
    ]


def _summarise(catalog: Catalog, name: str, family_name: str, cache: Path, driver: str) -> EnvironmentSummary:
    kind = "built-in" if is_built_in(family_name) else "package"
    try:
        family = catalog.family(name)
    except InputError as error:  # its package cannot be imported
        return EnvironmentSummary(
            name=name, kind=kind, family=family_name, usable=False, problem=error.message
        )
    if issubclass(family, NemoEnvironment):
        description = "Tasks of a NeMo Gym resources server."
        return EnvironmentSummary(name=name, kind="nemo-gym", family="", description=description)
    harness = harness_of(family)
    not_installed = missing(harness, cache) if harness is not None else ""
    problem = ""
    tasks = runnable = None
    try:
        reasons = example_obstacles(name, family, driver)
    except NoExampleData:
        pass
    except InputError as error:
        problem = error.message
    else:
        tasks, runnable = len(reasons), sum(not reason for reason in reasons)
        problem = next(filter(None, reasons), "")
    return EnvironmentSummary(
        name=name,
        kind=kind,
        family=family_name,
        harness=harness.name if harness is not None else "",
        tasks=tasks,
        runnable=runnable,
        usable=not not_installed and (bool(runnable) if tasks else not problem),
        problem=not_installed or problem,
        description=description_of(family),
    )


def example_obstacles(name: str, family: Family, driver: str) -> list[str]:
    """Return, for each example task, the reason why this machine cannot run it, or "".

    Args:
        name: name of the environment.
        family: class of the environment.
        driver: value of the setting `driver`.

    Raises:
        NoExampleData: there are no examples.
        InputError: the examples are wrong.
    """
    examples: list[Task] = read_tasks(family.load, examples_of(name, family))
    return [family.obstacle(task, driver) for task in examples]


def list_environments(settings: Settings, *, as_json: bool) -> None:
    """Print the environments of the configuration.

    Raises:
        InputError: the configuration is wrong.
    """
    found = summarise_environments(settings)
    if as_json:
        print_json(found)
    else:
        out.print(environments_table(found))
        err.print("tasks: number of examples that can run here; `prorl-envs tasks ENVIRONMENT` lists them")


def environments_table(found: list[EnvironmentSummary]) -> Table:
    """Return a table with one row per environment."""
    names = ("environment", "kind", "tasks", "usable", "description")
    table = plain_table(*names, numbers=["tasks"], unwrapped=["environment", "kind", "usable"])
    for summary in found:
        count = "-" if summary.tasks is None else f"{summary.runnable} of {summary.tasks}"
        description = plain(summary.description)
        if summary.problem:
            description.append("\n").append_text(Text(plain(summary.problem).plain, style="yellow"))
        table.add_row(plain(summary.name), summary.kind, count, _mark(summary.usable), description)
    return table


def _mark(usable: bool | None) -> Text:
    if usable is None:
        return Text("unknown", style="dim")
    return Text("yes", style="green") if usable else Text("no", style="bold red")


def list_tasks(
    settings: Settings,
    environment: str,
    data: Path | None,
    *,
    text: str,
    runnable: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """Print tasks of an environment: a table, or their rows as JSON Lines, which `--data` accepts as a file.

    Args:
        text: list only tasks with this text in their id or instruction, ignoring letter case.
        runnable: list only tasks that this machine can run.
        limit: maximum tasks; None for all.

    Raises:
        InputError: no such environment, the environment ships no examples, or a row is wrong.
    """
    catalog = Catalog.of(settings)
    family = catalog.family(environment)
    rows, unreadable = _readable(catalog, environment, data)
    matching = [
        (row, task, family.obstacle(task, settings.driver)) for row, task in rows if _matches(task, text)
    ]
    if runnable:
        matching = [(row, task, reason) for row, task, reason in matching if not reason]
    shown = matching[:limit]
    if as_json:
        print_json_lines(row for row, _, _ in shown)
    else:
        out.print(tasks_table((task, reason) for _, task, reason in shown))
    err.print(f"{len(shown)} of {len(rows)} tasks")
    for reason, count in Counter(reason for _, _, reason in matching if reason).most_common():
        err.print(plain(f"{count} cannot run here: {reason}"))
    for name, reason in unreadable:
        err.print(plain(f"{name} cannot be read: {reason}"), style="yellow")


def _readable(
    catalog: Catalog, environment: str, data: Path | None
) -> tuple[list[tuple[Any, Task]], list[tuple[str, str]]]:
    """Return the rows with their tasks; and, if `data` is a folder of task directories, the names of invalid
    directories with the reasons."""
    if data is None or not data.is_dir() or is_task_directory(data):
        return catalog.rows(environment, data), []
    rows: list[tuple[Any, Task]] = []
    unreadable: list[tuple[str, str]] = []
    for folder in filter(is_task_directory, sorted(data.iterdir())):
        try:
            rows += catalog.rows(environment, folder)
        except InputError as error:
            unreadable.append((folder.name, str(error.message).replace(f"{folder}:1: ", "")))
    if not rows and not unreadable:
        raise InputError(f"{data} contains no task directory", hint="it has a task.toml or a task.yaml")
    return rows, unreadable


def _matches(task: Task, text: str) -> bool:
    folded = text.casefold()
    return folded in task.id.casefold() or folded in task.instruction.casefold()


def tasks_table(tasks: Iterable[tuple[Task, str]]) -> Table:
    """Return a table with one row per task.

    Args:
        tasks: each task with the reason why it cannot run, or "".
    """
    table = plain_table("task", "runnable", "instruction")
    for task, reason in tasks:
        runnable = (
            Text(plain(f"no: {reason}").plain, style="yellow") if reason else Text("yes", style="green")
        )
        instruction = plain(task.instruction.strip().partition("\n")[0])
        instruction.truncate(_WIDTH, overflow="ellipsis")
        table.add_row(plain(task.id), runnable, instruction)
    return table
