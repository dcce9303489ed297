"""Live progress of submitted groups, by stage."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from rich import progress
from rich.console import RenderableType
from rich.text import Text

from prorl_envs.cli.output.console import err, plain
from prorl_envs.cli.output.tables import outcome_cell
from prorl_envs.rollout.api.summary import summarise
from prorl_envs.rollout.api.types import Result, Stage
from prorl_envs.rollout.client.client import RolloutClient

_POLL_S = 0.25
#: Seconds between lines if the output is not a terminal.
_LINE_S = 5.0


class Progress(progress.Progress):
    """Bars of the stages and of the results on a terminal, and the last result below them.

    Args:
        expected: number of results of the run.
        done: number of results so far, including those of earlier sessions.
    """

    def __init__(self, expected: int, done: int) -> None:
        self.last, self.failed = Text(), 0
        super().__init__(
            progress.TextColumn("{task.description}", style="bold"),
            progress.BarColumn(24),
            progress.TextColumn("{task.fields[note]}"),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self.stages = {str(stage): self.add_task(stage.upper(), total=1, note="") for stage in Stage}
        self.done = self.add_task("DONE", total=expected, completed=done, note=f"{done}/{expected}")

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bars, and the last result."""
        yield from super().get_renderables()
        yield self.last

    def add(self, result: Result) -> None:
        """Record a new result."""
        self.failed += result.failure is not None
        done = self.tasks[self.done]
        note = f"{done.completed + 1:.0f}/{done.total:.0f}"
        note += f", {self.failed} without a reward" if self.failed else ""
        self.update(self.done, advance=1, note=note)
        self.last = Text.assemble(
            ("last: ", "dim"), plain(result.job_id), " ", outcome_cell(summarise(result))
        )

    @asynccontextmanager
    async def following(self, client: RolloutClient) -> AsyncIterator[None]:
        """Draw the results and the status of the service while the block runs."""
        with self:
            drawing = asyncio.create_task(self._draw(client))
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.wait({drawing})
        if not drawing.cancelled():
            drawing.result()

    async def _draw(self, client: RolloutClient) -> None:
        loop = asyncio.get_running_loop()
        printed = loop.time()
        while True:
            notes = []
            for stage, pool in (await client.status()).pools.items():
                note = f"{pool.active}/{pool.limit} active, {pool.waiting} waiting"
                self.update(self.stages[stage], total=pool.limit, completed=pool.active, note=note)
                notes.append(f"{stage} {note}")
            if self.disable and loop.time() - printed >= _LINE_S:
                printed = loop.time()
                err.print(" | ".join([f"{self.tasks[self.done].fields['note']} done", *notes]))
            await asyncio.sleep(_POLL_S)
