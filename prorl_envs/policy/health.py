"""Asks model servers how they are, beside what their answers show.

A turn that fails takes its server out for a while (`Router.failed`); asking brings it back without risking
another turn, and finds a dead server before a turn does. A server that stays away is asked ever more rarely.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.policy.balance import ServerState
from prorl_envs.policy.pool import ModelPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """When servers are asked.

    Args:
        every_s: seconds between two questions to a server that is well.
        failed_s: seconds after which a failed one is asked, at first; doubles each time.
        max_failed_s: longest such time.
    """

    every_s: float = 15.0
    failed_s: float = 1.0
    max_failed_s: float = 30.0


def due(server: ServerState, rhythm: Rhythm) -> float:
    """Seconds from one question to a server to the next."""
    if not server.failures:
        return rhythm.every_s
    return min(rhythm.failed_s * 2.0 ** min(server.failures - 1, 30), rhythm.max_failed_s)


@asynccontextmanager
async def watching(
    pool: ModelPool, *, rhythm: Rhythm = Rhythm(), clock: Clock | None = None
) -> AsyncIterator[None]:
    """Ask the pool's servers how they are while the block runs."""
    task = asyncio.create_task(_watch(pool, rhythm, clock or SystemClock()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _watch(pool: ModelPool, rhythm: Rhythm, clock: Clock) -> None:
    """Each server in its own time; none keeps another waiting."""
    asked: dict[str, float] = {}
    asking: dict[str, asyncio.Task[bool]] = {}
    try:
        while True:
            now = clock.monotonic()
            servers = {server.url: server for server in pool.servers if not server.draining}
            asked = {url: asked.get(url, now - rhythm.every_s) for url in servers}
            for url, server in servers.items():
                if url not in asking and now - asked[url] >= due(server, rhythm):
                    asked[url] = now
                    asking[url] = asyncio.create_task(pool.look(url))
                    asking[url].add_done_callback(lambda _, url=url: asking.pop(url, None))  # type: ignore[misc]
            await clock.sleep(min(rhythm.failed_s, rhythm.every_s))
    finally:
        for task in list(asking.values()):
            task.cancel()
        if asking:
            await asyncio.wait(asking.values())
