"""Live progress of submitted groups, by stage."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.output.console import err, plain
from prorl_envs.cli.output.tables import outcome_cell
from prorl_envs.rollout.api.summary import Summary, summarise
from prorl_envs.rollout.api.types import Result, Stage
from prorl_envs.rollout.api.views import StatusView
from prorl_envs.rollout.client.client import RolloutClient

_POLL_S = 0.25
#: Seconds between lines if the output is not a terminal.
_LINE_S = 5.0
_BAR = 24


@dataclass
class Progress:
    """Progress to draw: the last status, and the results so far.

    Args:
        expected: number of results of the run.
        done: number of results so far, including those of earlier sessions.
        failed: number of failures in this session.
        status: last status of the service.
        last: last result.
    """

    expected: int
    done: int = 0
    failed: int = 0
    status: StatusView | None = None
    last: Summary | None = None

    def add(self, result: Result) -> None:
        """Record a new result."""
        self.done += 1
        self.failed += result.failure is not None
        self.last = summarise(result)

    @property
    def line(self) -> str:
        """Progress in one line."""
        parts = [f"{self.done}/{self.expected} done"]
        if self.status is not None:
            for stage in Stage:
                pool = self.status.pools[stage]
                parts.append(f"{stage} {pool.active} active, {pool.waiting} waiting")
        return " | ".join(parts)

    def __rich__(self) -> RenderableType:
        grid = pools_grid(self.status)
        done = ProgressBar(total=self.expected, completed=self.done, width=_BAR)
        note = f"{self.done}/{self.expected}" + (f", {self.failed} without a reward" if self.failed else "")
        grid.add_row("DONE", done, note)
        return Group(grid, self._last())

    def _last(self) -> Text:
        if self.last is None:
            return Text("")
        return Text.assemble(("last: ", "dim"), plain(self.last.job_id), " ", outcome_cell(self.last))


def pools_grid(status: StatusView | None) -> Table:
    """Return a table without headings that has a row with a bar for each stage of a status."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold")
    grid.add_column(width=_BAR)
    grid.add_column()
    for stage, pool in status.pools.items() if status is not None else ():
        bar = ProgressBar(total=pool.limit, completed=min(pool.active, pool.limit), width=_BAR)
        grid.add_row(stage.upper(), bar, f"{pool.active}/{pool.limit} active, {pool.waiting} waiting")
    return grid


@asynccontextmanager
async def following(client: RolloutClient, progress: Progress) -> AsyncIterator[None]:
    """Draw the progress and the status of the service while the block runs."""
    live = Live(progress, console=err, refresh_per_second=8, transient=True)
    with live if err.is_terminal else nullcontext():
        drawing = asyncio.create_task(_draw(client, progress, lines=not err.is_terminal))
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.wait({drawing})
    if not drawing.cancelled():
        drawing.result()


async def _draw(client: RolloutClient, progress: Progress, *, lines: bool) -> None:
    loop = asyncio.get_running_loop()
    printed = loop.time()
    while True:
        progress.status = await client.status()
        if lines and loop.time() - printed >= _LINE_S:
            printed = loop.time()
            err.print(progress.line)
        await asyncio.sleep(_POLL_S)
