"""Health checks of model servers, in addition to the results of their turns.

A failed turn excludes its server for a while (`Router.failed`). A health check readmits it without risking
another turn, and finds a dead server before a turn does. Checks of a server that stays down become rarer.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.model.routing.balance import ServerState
from prorl_envs.model.routing.pool import ModelPool

#: Seconds between two checks of a healthy server.
_EVERY_S = 15.0
#: Seconds until the first check of a failed server, which double each time, and their maximum.
_FAILED_S, _MAX_FAILED_S = 1.0, 30.0


def due(server: ServerState) -> float:
    """Return the seconds between two checks of a server."""
    if not server.failures:
        return _EVERY_S
    return min(_FAILED_S * 2.0 ** min(server.failures - 1, 30), _MAX_FAILED_S)


@asynccontextmanager
async def watching(pool: ModelPool, *, clock: Clock | None = None) -> AsyncIterator[None]:
    """Send health checks to the pool's servers while the block runs."""
    task = asyncio.create_task(_watch(pool, clock or SystemClock()))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _watch(pool: ModelPool, clock: Clock) -> None:
    """Check each server on its own schedule, so that no server delays another."""
    checked_at: dict[str, float] = {}
    checks: dict[str, asyncio.Task[bool]] = {}
    try:
        while True:
            now = clock.monotonic()
            servers = {server.url: server for server in pool.servers if not server.draining}
            checked_at = {url: checked_at.get(url, now - _EVERY_S) for url in servers}
            for url, server in servers.items():
                if url not in checks and now - checked_at[url] >= due(server):
                    checked_at[url] = now
                    checks[url] = asyncio.create_task(pool.check(url))
                    checks[url].add_done_callback(lambda _, url=url: checks.pop(url, None))  # type: ignore[misc]
            await clock.sleep(_FAILED_S)
    finally:
        for task in list(checks.values()):
            task.cancel()
        if checks:
            await asyncio.wait(checks.values())
