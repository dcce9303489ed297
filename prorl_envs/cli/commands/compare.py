"""`prorl-envs compare`: comparison of two runs, task by task."""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.cli.options import JsonOption
from prorl_envs.cli.output.console import out, plain, print_json
from prorl_envs.cli.sources import SourceArgument, check_lines, open_episodes
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from prorl_envs.rollout.api.summary import Summary
    from prorl_envs.runs.statistics import Comparison


def compare(
    before: SourceArgument,
    after: SourceArgument,
    rows: Annotated[int, typer.Option(min=0, help="Maximum tasks to list, largest changes first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Compare the rewards of two runs task by task: wins, losses, mean change, sign test."""
    from prorl_envs.runs.statistics import compare as compared

    result = compared(_summaries(before), _summaries(after))
    if not result.tasks:
        raise InputError(
            "the two runs have no scored task in common",
            hint=f"{result.only_before} tasks are only in {before}, {result.only_after} only in {after}",
        )
    if as_json:
        print_json(result)
        return
    out.print(_table(result, rows))
    for line in _lines(result):
        out.print(line)


def _summaries(source: str) -> "Sequence[Summary]":
    with closing(open_episodes(source)) as episodes:
        episodes.extend()
        check_lines(episodes, source)
        return list(episodes.summaries)


def _table(result: "Comparison", rows: int) -> "Table":
    from rich.text import Text

    from prorl_envs.cli.output.fitted_table import plain_table

    changed = sorted((task for task in result.tasks if task.change), key=lambda task: -abs(task.change))
    omitted = len(changed) - rows
    numbers = ("before", "after", "change")
    table = plain_table("environment", "task", *numbers, title="changed tasks", numbers=numbers)
    table.caption = f"{omitted} more" if omitted > 0 else None
    for task in changed[:rows]:
        style = "green" if task.change > 0 else "red"
        values = (f"{task.before:.3f}", f"{task.after:.3f}", Text(f"{task.change:+.3f}", style=style))
        table.add_row(plain(task.environment), plain(task.task_id), *values)
    return table


def _lines(result: "Comparison") -> list[str]:
    change = (result.mean_after or 0.0) - (result.mean_before or 0.0)
    error = "" if result.standard_error is None else f" ± {result.standard_error:.3f}"
    lines = [
        f"tasks in both: {len(result.tasks)}   "
        f"mean reward: {result.mean_before:.3f} -> {result.mean_after:.3f}   change: {change:+.3f}{error}",
        f"wins: {result.wins}   losses: {result.losses}   ties: {result.ties}"
        f"   sign test: p = {result.p_value:.3g}",
    ]
    if result.only_before or result.only_after:
        lines.append(
            f"left out: {result.only_before} tasks only in the first run, {result.only_after} in the second"
        )
    return lines
