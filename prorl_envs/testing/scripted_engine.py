"""Simulated sampling time of the scripted model server, with pauses, resumption and weight changes.

The sample is known from the start. The engine only determines how many of its ids have been sampled at the
time of an abort, a pause or a weight change.
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
        total: number of ids to sample.
        spans: one pair per weight version, oldest first: the version, and the number of ids sampled up to the
            end of its use.
        aborted: the request was aborted; the ids sampled before the abort are valid.
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
        clock: clock for the sampling time.
        latency_s: seconds before the first token.
        tokens_per_s: sampling speed; None samples without delay.
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
        """Start no further requests, and apply `treatment` to the requests in progress.

        Args:
            name: name for the list of pauses; by default the treatment.
        """
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
        self,
        total: int,
        rid: str,
        disconnected: Awaitable[None],
        on_progress: Callable[[int], None] | None = None,
    ) -> TurnProgress | None:
        """Wait for the time that sampling `total` ids takes.

        Args:
            rid: request id for `abort`.
            disconnected: done when the client disconnects.
            on_progress: called during sampling with the number of sampled ids.

        Returns:
            The progress at the end or at the abort, or None if the client disconnected before.
        """
        disconnect = asyncio.ensure_future(disconnected)
        progress = TurnProgress(total)
        spent = 0.0
        try:
            while self.paused:  # vLLM and SGLang both delay new requests during a pause
                if not await self._wait(disconnect, None):
                    return None
            while not progress.aborted and progress.sampled < total:
                version, began = self.version, self._clock.monotonic()
                seconds = self._seconds(total) - spent
                if on_progress is not None and self._tokens_per_s:
                    seconds = min(seconds, 1 / self._tokens_per_s)
                if not await self._wait(disconnect, seconds):
                    return None
                spent += self._clock.monotonic() - began
                if progress.spans and progress.spans[-1][0] == version:
                    progress.spans.pop()
                progress.spans.append((version, self._sampled_after(spent, total)))
                if on_progress is not None:
                    on_progress(progress.sampled)
                progress.aborted = rid in self._aborted or (
                    self._treatment == "abort" and progress.sampled < total
                )
                while self._treatment == "freeze" and progress.sampled < total and not progress.aborted:
                    if not await self._wait(disconnect, None):
                        return None
                    progress.aborted = rid in self._aborted
            return progress
        finally:
            self._aborted.discard(rid)
            disconnect.cancel()

    def _seconds(self, total: int) -> float:
        return self._latency_s + (total / self._tokens_per_s if self._tokens_per_s else 0.0)

    def _sampled_after(self, spent: float, total: int) -> int:
        """Return the number of ids sampled after `spent` seconds."""
        if spent >= self._seconds(total) - 1e-9:
            return total
        return min(total, max(0, int((spent - self._latency_s) * (self._tokens_per_s or 0.0))))

    async def _wait(self, disconnect: asyncio.Future[None], seconds: float | None) -> bool:
        """Wait for a change, but at most `seconds`; return False if the client disconnected."""
        changed = asyncio.ensure_future(self._changed.wait())
        waits: set[asyncio.Future[Any]] = {disconnect, changed}
        if seconds is not None:
            waits.add(asyncio.ensure_future(self._clock.sleep(seconds)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return not disconnect.done()
        finally:
            for wait in waits - {disconnect}:
                wait.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
