"""Leases: cancel groups and batches whose client sends no requests about them any more.

A killed trainer sends no message. So a group or batch with `lease_s` is cancelled after this time without a
request about it. Each HTTP request of its owner or of the operator that names it renews the lease. The lease
does not expire while such a request is open, for example a long poll.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.clock import Clock
from prorl_envs.rollout.api.caller import Caller

log = logging.getLogger(__name__)

#: Seconds between two checks for expired leases.
TICK_S = 1.0
#: Suffixes that may follow an id in a path.
_SUFFIXES = {
    "groups": (),
    "jobs": ("/result", "/token"),
    "batches": ("/groups", "/tasks", "/results"),
}


@dataclass(slots=True)
class _Lease:
    seconds: float
    last_request: float
    open: int = 0


class Leases:
    """Active leases of a service.

    Args:
        clock: measures the time since the last request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancel: dict[str, Callable[[str], Awaitable[object]]] = {}
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._not_empty = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def on_expiry(self, kind: str, cancel: Callable[[str], Awaitable[object]]) -> None:
        """Call `cancel` with the id of each item of a kind (`groups` or `batches`) whose lease expires."""
        self._cancel[kind] = cancel

    def start(self) -> None:
        """Start the task that cancels items with expired leases."""
        self._task = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        """Stop the task that `start` started. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def grant(self, kind: str, name: str, seconds: float | None) -> None:
        """Start a lease for a group or batch. Does nothing if `seconds` is None."""
        if seconds is not None:
            self._leases[kind, name] = _Lease(seconds, self._clock.monotonic())
            self._not_empty.set()

    @contextmanager
    def keep_alive(self, names: set[tuple[str, str]]) -> Iterator[None]:
        """Keep the leases of these items alive while the block runs, and renew them after it."""
        leases = [self._leases[name] for name in names if name in self._leases]
        for lease in leases:
            lease.open += 1
        try:
            yield
        finally:
            for lease in leases:
                lease.open -= 1
                lease.last_request = self._clock.monotonic()

    async def _watch(self) -> None:
        while True:
            if not self._leases:
                self._not_empty.clear()
                await self._not_empty.wait()
            await self._clock.sleep(TICK_S)
            now = self._clock.monotonic()
            for (kind, name), lease in list(self._leases.items()):
                if not lease.open and now - lease.last_request >= lease.seconds:
                    del self._leases[kind, name]
                    await self._expire(kind, name, lease.seconds)

    async def _expire(self, kind: str, name: str, seconds: float) -> None:
        log.info("%s %s: no request for %g s; its unfinished jobs are cancelled", kind, name, seconds)
        try:
            await self._cancel[kind](name)
        except Exception:
            log.exception("%s %s could not be cancelled", kind, name)


class LeaseMiddleware:
    """Middleware that renews the leases of the groups and batches that a request names, if they belong to the
    caller. A caller with a job token renews no lease, since it does not need the group's other jobs.

    Args:
        app: the next application. The caller must be authenticated before this middleware runs.
        leases: leases of the service.
    """

    def __init__(self, app: ASGIApp, leases: Leases) -> None:
        self._app = app
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._leases:
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["state"]["caller"]
        items = named_items(scope["path"], scope["query_string"])
        with self._leases.keep_alive({(kind, name) for kind, name in items if caller.owns_all(name)}):
            await self._app(scope, receive, send)


def named_items(path: str, query: bytes) -> set[tuple[str, str]]:
    """Return the groups and batches that a request names, by kind and id."""
    _, version, kind, rest = (*path.split("/", 3), "", "", "")[:4]
    if version != "v1":
        return set()
    if kind == "results":
        return {("groups", value) for key, value in parse_qsl(query.decode("latin-1")) if key == "group"}
    for suffix in _SUFFIXES.get(kind, ()):
        rest = rest.removesuffix(suffix)
    match kind:
        case "groups" | "batches" if rest:
            return {(kind, rest)}
        case "jobs":
            return {("groups", rest.rpartition("/")[0])}
        case _:
            return set()
