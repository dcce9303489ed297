"""Follow submitted groups, showing the three stages as they move."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.console import err, plain
from prorl_envs.cli.tables import reward_cell
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.types import Result, Stage
from prorl_envs.rollout.views import StatusView

_LOOK_S = 0.25
#: Seconds between lines where nobody watches a terminal.
_LINE_S = 5.0
_BAR = 24


@dataclass
class Picture:
    """What is drawn: the last status, and what has come back.

    Args:
        expected: results to come.
    """

    expected: int
    status: StatusView | None = None
    results: list[Result] = field(default_factory=list)
    #: How many stages were at work, at how many looks.
    overlap: Counter[int] = field(default_factory=Counter)

    def look(self, status: StatusView) -> None:
        """Take in a new status."""
        self.status = status
        self.overlap[sum(pool.active > 0 for pool in status.pools.values())] += 1

    @property
    def line(self) -> str:
        """The picture in one line."""
        parts = [f"{len(self.results)}/{self.expected} done"]
        if self.status is not None:
            for stage in Stage:
                pool = self.status.pools[stage]
                parts.append(f"{stage} {pool.active} active, {pool.waiting} waiting")
        return " | ".join(parts)

    def __rich__(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="bold")
        grid.add_column(width=_BAR)
        grid.add_column()
        if self.status is not None:
            for stage in Stage:
                pool = self.status.pools[stage]
                bar = ProgressBar(total=pool.limit, completed=pool.active, width=_BAR)
                grid.add_row(stage.upper(), bar, f"{pool.active}/{pool.limit} active, {pool.waiting} waiting")
        failed = sum(r.failure is not None for r in self.results)
        done = ProgressBar(total=self.expected, completed=len(self.results), width=_BAR)
        note = f"{len(self.results)}/{self.expected}" + (f", {failed} without a reward" if failed else "")
        grid.add_row("DONE", done, note)
        return Group(grid, self._last())

    def _last(self) -> Text:
        if not self.results:
            return Text("")
        last = self.results[-1]
        return Text.assemble(("last: ", "dim"), plain(last.job_id), " ", reward_cell(last))


async def follow(
    client: RolloutClient, groups: Collection[str], expected: int
) -> tuple[Sequence[Result], str]:
    """Follow groups to their end.

    Args:
        client: of the service they were submitted to.
        groups: their ids.
        expected: how many results they come to.

    Returns:
        the results in the order in which they came, and a sentence on how the stages overlapped.
    """
    picture = Picture(expected)
    async with _drawing(client, picture):
        async for result in client.follow(groups):
            picture.results.append(result)
    looks = sum(picture.overlap.values()) or 1
    both, all_three = (sum(n for busy, n in picture.overlap.items() if busy >= k) for k in (2, 3))
    sentence = (
        f"of {looks} looks at the service, {both / looks:.0%} saw two stages at work at once "
        f"and {all_three / looks:.0%} all three"
    )
    return picture.results, sentence


@asynccontextmanager
async def _drawing(client: RolloutClient, picture: Picture) -> AsyncIterator[None]:
    live = Live(picture, console=err, refresh_per_second=8, transient=True) if err.is_terminal else None
    if live is not None:
        live.start()
    drawing = asyncio.create_task(_draw(client, picture, lines=live is None))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait({drawing})
        if live is not None:
            live.stop()
    if not drawing.cancelled():
        drawing.result()


async def _draw(client: RolloutClient, picture: Picture, *, lines: bool) -> None:
    loop = asyncio.get_running_loop()
    said = loop.time()
    while True:
        picture.look(await client.status())
        if lines and loop.time() - said >= _LINE_S:
            said = loop.time()
            err.print(picture.line)
        await asyncio.sleep(_LOOK_S)
