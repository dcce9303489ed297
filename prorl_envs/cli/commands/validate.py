"""`prorl-envs validate`: check that the tasks of a data file distinguish right from wrong solutions."""

from dataclasses import asdict
from pathlib import Path

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from prorl_envs.app.compose import node
from prorl_envs.cli.options import catalog_without_harness
from prorl_envs.cli.output.console import err, out, print_by_reason, print_json
from prorl_envs.config import Settings
from prorl_envs.env.validate import ValidationVerdict, validate
from prorl_envs.errors import InputError


def verdict_table(verdicts: list[ValidationVerdict]) -> Table:
    """Return a table with one row per task."""
    table = Table(title="validation", title_justify="left")
    table.add_column("task", overflow="fold")
    for name in ("reference", "untouched", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for v in verdicts:
        state, style = (
            ("left out", "yellow") if v.skipped else ("invalid", "red") if v.problems else ("ok", "green")
        )
        table.add_row(
            v.task_id,
            " ".join(f"{reward:g}" for reward in v.reference) or "-",
            "-" if v.untouched is None else f"{v.untouched:g}",
            f"{v.seconds:.2f}",
            Text(state, style=style),
        )
    return table


async def validate_file(
    settings: Settings,
    environment: str,
    data: Path | None,
    jobs: int,
    *,
    allow_missing: bool = False,
    as_json: bool = False,
) -> bool:
    """Validate the tasks of a data file that this machine can run; print why it cannot run others.

    Args:
        settings: all settings.
        environment: name of the environment.
        data: the data file; None means the environment's examples.
        jobs: maximum episodes at a time.
        allow_missing: whether to succeed even if some tasks cannot run on this machine.
        as_json: print JSON instead of a table.

    Returns:
        True if every task can run here and is valid.

    Raises:
        InputError: no such environment, a row is wrong, or no task can run here.
    """
    catalog = catalog_without_harness(settings, environment)
    chosen = catalog.family(environment)
    tasks, left_out = [], list[tuple[str, str]]()
    for task in catalog.tasks(environment, data):
        if reason := chosen.obstacle(task, settings.driver):
            left_out.append((task.id, reason))
        else:
            tasks.append(task)
    print_by_reason("left out", left_out, style="yellow")
    if not tasks:
        raise InputError(f"there is no {environment} task that this machine can run")
    async with node(settings) as opened, catalog:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
            row = bar.add_task(f"validating {environment}", total=len(tasks))
            verdicts = await validate(
                chosen, opened, tasks, concurrency=jobs, progress=lambda _: bar.advance(row)
            )
    if as_json:
        print_json([{**asdict(verdict), "ok": verdict.ok} for verdict in verdicts])
    else:
        out.print(verdict_table(verdicts))
        print_by_reason("left out", [(v.task_id, v.skipped) for v in verdicts if v.skipped], style="yellow")
        problems = [(v.task_id, problem) for v in verdicts for problem in v.problems]
        print_by_reason("invalid", problems, style="red", console=out)
    return all(verdict.ok for verdict in verdicts) and (allow_missing or not left_out)
