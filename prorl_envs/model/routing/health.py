"""Health checks of model servers, in addition to the results of their turns.

A failed turn excludes its server for a while (`Router.failed`). A health check readmits it without risking
another turn, and finds a dead server before a turn does. Checks of a server that stays down become rarer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.model.routing.balance import ServerState
from prorl_envs.model.routing.pool import ModelPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Intervals of health checks.

    Args:
        every_s: seconds between two checks of a healthy server.
        failed_s: seconds until the first check of a failed server; doubles each time.
        max_failed_s: maximum seconds between two checks of a failed server.
    """

    every_s: float = 15.0
    failed_s: float = 1.0
    max_failed_s: float = 30.0


def due(server: ServerState, rhythm: Rhythm) -> float:
    """Return the seconds between two checks of a server."""
    if not server.failures:
        return rhythm.every_s
    return min(rhythm.failed_s * 2.0 ** min(server.failures - 1, 30), rhythm.max_failed_s)


@asynccontextmanager
async def watching(
    pool: ModelPool, *, rhythm: Rhythm = Rhythm(), clock: Clock | None = None
) -> AsyncIterator[None]:
    """Send health checks to the pool's servers while the block runs."""
    task = asyncio.create_task(_watch(pool, rhythm, clock or SystemClock()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _watch(pool: ModelPool, rhythm: Rhythm, clock: Clock) -> None:
    """Check each server on its own schedule, so that no server delays another."""
    checked_at: dict[str, float] = {}
    checks: dict[str, asyncio.Task[bool]] = {}
    try:
        while True:
            now = clock.monotonic()
            servers = {server.url: server for server in pool.servers if not server.draining}
            checked_at = {url: checked_at.get(url, now - rhythm.every_s) for url in servers}
            for url, server in servers.items():
                if url not in checks and now - checked_at[url] >= due(server, rhythm):
                    checked_at[url] = now
                    checks[url] = asyncio.create_task(pool.check(url))
                    checks[url].add_done_callback(lambda _, url=url: checks.pop(url, None))  # type: ignore[misc]
            await clock.sleep(min(rhythm.failed_s, rhythm.every_s))
    finally:
        for task in list(checks.values()):
            task.cancel()
        if checks:
            await asyncio.wait(checks.values())
