"""Simulated sampling time of the scripted model server, with pauses, resumption and weight changes.

Nothing is computed; a sample is known from the start. The engine only determines how much of it has been
sampled when an event happens.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from prorl_envs.clock import Clock

type Treatment = Literal["finish", "abort", "freeze"]


@dataclass(slots=True)
class TurnProgress:
    """Progress of a request.

    Args:
        total: ids to sample.
        spans: (version, ids sampled so far) of each stretch, oldest first.
        aborted: the request was aborted; its sampled ids count.
    """

    total: int
    spans: list[tuple[str, int]] = field(default_factory=list)
    aborted: bool = False

    @property
    def sampled(self) -> int:
        return self.spans[-1][1] if self.spans else 0


class ScriptedEngine:
    """Sampling time, pauses and weights.

    Args:
        clock: clock of the sampling time.
        latency_s: seconds before the first token.
        tokens_per_s: sampling speed; None is instant.
        version: version of the weights.
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
        """Start no further request, and apply this treatment to requests in flight."""
        self._treatment = treatment
        self.pauses.append(name or treatment)
        self._notify()

    def resume(self) -> None:
        """Resume sampling."""
        self._treatment = None
        self._notify()

    def abort(self, rid: str) -> None:
        """Abort one request."""
        self._aborted.add(rid)
        self._notify()

    async def spend(
        self, total: int, rid: str, left: Awaitable[None], told: Callable[[int], None] | None = None
    ) -> TurnProgress | None:
        """Wait as long as sampling `total` ids would take; return None if the client disconnected before.

        Args:
            rid: request id for `abort`.
            left: done when the client disconnects.
            told: receives the number of sampled ids, during sampling; None disables it.
        """
        leaving = asyncio.ensure_future(left)
        progress = TurnProgress(total)
        spent = 0.0
        try:
            while self.paused:  # both kinds of server hold new requests while they are paused
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
        """Return the number of ids sampled after `spent` seconds."""
        if spent >= self._seconds(total) - 1e-9:
            return total
        return min(total, max(0, int((spent - self._latency_s) * (self._tokens_per_s or 0.0))))

    async def _either(self, leaving: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for the time, or for a change; return False if the client disconnected."""
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
