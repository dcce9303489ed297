"""`prorl-envs validate`: does a data file discriminate?"""

from pathlib import Path

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from prorl_envs.catalog import Catalog
from prorl_envs.cli.compose import by_hand, node
from prorl_envs.cli.console import err, out
from prorl_envs.config import Settings
from prorl_envs.env.validate import Verdict, validate
from prorl_envs.errors import InputError


def verdict_table(verdicts: list[Verdict]) -> Table:
    """One row per task."""
    table = Table(title="validation", title_justify="left")
    table.add_column("task", overflow="fold")
    for name in ("reference", "untouched", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for v in verdicts:
        table.add_row(
            v.task_id,
            " ".join(f"{reward:g}" for reward in v.reference) or "-",
            "-" if v.untouched is None else f"{v.untouched:g}",
            f"{v.seconds:.2f}",
            Text("ok", style="green") if v.ok else Text("; ".join(v.problems), style="red"),
        )
    return table


async def validate_file(settings: Settings, environment: str, data: Path | None, jobs: int) -> bool:
    """Validate the tasks of a data file that this machine can run.

    Returns:
        whether every one of them discriminates.

    Raises:
        InputError: no such environment, a row is wrong, or there is nothing to validate.
    """
    catalog = by_hand(Catalog.of(settings), environment)
    chosen = catalog.family(environment)
    tasks = []
    for task in catalog.tasks(environment, data):
        if reason := chosen.unavailable(task):
            err.print(f"left out: {task.id}: {reason}")
        else:
            tasks.append(task)
    if not tasks:
        raise InputError(f"there is no {environment} task that this machine can run")
    async with node(settings) as opened, catalog:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
            row = bar.add_task(f"validating {environment}", total=len(tasks))
            verdicts = await validate(
                chosen, opened, tasks, concurrency=jobs, progress=lambda _: bar.advance(row)
            )
    out.print(verdict_table(verdicts))
    return all(verdict.ok for verdict in verdicts)
