"""How the scripted model server spends the time of sampling: it can be stopped, go on, and change weights.

Nothing is computed; a sample is known from the start, and what counts is how much of it would have been
sampled when something happened.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from prorl_envs.clock import Clock

type Treatment = Literal["finish", "abort", "freeze"]


@dataclass(slots=True)
class Progress:
    """How far a request came.

    Args:
        total: ids there are to sample.
        spans: (version, ids sampled by then) of each stretch, oldest first.
        aborted: it was broken off; what is sampled counts.
    """

    total: int
    spans: list[tuple[str, int]] = field(default_factory=list)
    aborted: bool = False

    @property
    def sampled(self) -> int:
        return self.spans[-1][1] if self.spans else 0


class ScriptedEngine:
    """Time, pauses and weights.

    Args:
        clock: of the time that sampling takes.
        latency_s: seconds before the first token.
        tokens_per_s: sampling speed; None is instant.
        version: of the weights.
    """

    def __init__(self, clock: Clock, latency_s: float, tokens_per_s: float | None, version: str) -> None:
        self.version = version
        self.pauses: list[str] = []
        self._clock = clock
        self._latency_s = latency_s
        self._tokens_per_s = tokens_per_s
        self._treatment: Treatment | None = None
        self._changed = asyncio.Event()
        self._aborted: set[str] = set()

    @property
    def paused(self) -> bool:
        return self._treatment is not None

    def pause(self, treatment: Treatment, name: str = "") -> None:
        """Begin nothing more, and treat what is in flight like this."""
        self._treatment = treatment
        self.pauses.append(name or treatment)
        self._notify()

    def resume(self) -> None:
        """Go on."""
        self._treatment = None
        self._notify()

    def abort(self, rid: str) -> None:
        """Break one request off."""
        self._aborted.add(rid)
        self._notify()

    async def spend(
        self, total: int, rid: str, left: Awaitable[None], told: Callable[[int], None] | None = None
    ) -> Progress | None:
        """Take as long as sampling `total` ids would; None where the client left before the end.

        Args:
            rid: what `abort` knows the request as.
            left: done when the client leaves.
            told: of how many ids are sampled, as they are; None asks for nothing on the way.
        """
        leaving = asyncio.ensure_future(left)
        progress = Progress(total)
        spent = 0.0
        try:
            while self.paused:  # both kinds of server hold what comes while they are paused
                if not await self._either(leaving, None):
                    return None
            while not progress.aborted and progress.sampled < total:
                version, began = self.version, self._clock.monotonic()
                seconds = self._seconds(total) - spent
                if told is not None and self._tokens_per_s:
                    seconds = min(seconds, 1 / self._tokens_per_s)
                if not await self._either(leaving, seconds):
                    return None
                spent += self._clock.monotonic() - began
                if progress.spans and progress.spans[-1][0] == version:
                    progress.spans.pop()
                progress.spans.append((version, self._by(spent, total)))
                if told is not None:
                    told(progress.sampled)
                progress.aborted = rid in self._aborted or (
                    self._treatment == "abort" and progress.sampled < total
                )
                while self._treatment == "freeze" and progress.sampled < total and not progress.aborted:
                    if not await self._either(leaving, None):
                        return None
                    progress.aborted = rid in self._aborted
            return progress
        finally:
            self._aborted.discard(rid)
            leaving.cancel()

    def _seconds(self, total: int) -> float:
        return self._latency_s + (total / self._tokens_per_s if self._tokens_per_s else 0.0)

    def _by(self, spent: float, total: int) -> int:
        """Ids sampled after so many seconds."""
        if spent >= self._seconds(total) - 1e-9:
            return total
        return min(total, max(0, int((spent - self._latency_s) * (self._tokens_per_s or 0.0))))

    async def _either(self, leaving: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for the time, or for a change; False where the client left."""
        changed = asyncio.ensure_future(self._changed.wait())
        waits: set[asyncio.Future[Any]] = {leaving, changed}
        if seconds is not None:
            waits.add(asyncio.ensure_future(self._clock.sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not leaving.done()
        finally:
            for wait in waits - {leaving}:
                wait.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
