"""Leases: cancel groups and batches whose client has stopped asking about them.

A killed trainer sends no message. A request with `lease_s` stays alive as long as its owner asks about it:
any HTTP request of its owner, or of the operator, that names the group or batch renews the lease, and the
lease does not expire while such a request is open, for example a long poll.
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
_ENDS = {
    "groups": (),
    "jobs": ("/result", "/token"),
    "batches": ("/groups", "/tasks", "/results"),
}


@dataclass(slots=True)
class _Lease:
    seconds: float
    heard: float
    open: int = 0


class Leases:
    """The active leases.

    Args:
        clock: measures them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cancel: dict[str, Callable[[str], Awaitable[object]]] = {}
        self._leases: dict[tuple[str, str], _Lease] = {}
        self._some = asyncio.Event()
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
        """Stop that task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def grant(self, kind: str, name: str, seconds: float | None) -> None:
        """Start a lease for a group or batch; does nothing if `seconds` is None."""
        if seconds is not None:
            self._leases[kind, name] = _Lease(seconds, self._clock.monotonic())
            self._some.set()

    @contextmanager
    def followed(self, names: set[tuple[str, str]]) -> Iterator[None]:
        """Keep the leases of these items alive while the block runs, and renew them after it."""
        leases = [self._leases[name] for name in names if name in self._leases]
        for lease in leases:
            lease.open += 1
        try:
            yield
        finally:
            for lease in leases:
                lease.open -= 1
                lease.heard = self._clock.monotonic()

    async def _watch(self) -> None:
        while True:
            if not self._leases:
                self._some.clear()
                await self._some.wait()
            await self._clock.sleep(TICK_S)
            now = self._clock.monotonic()
            for (kind, name), lease in list(self._leases.items()):
                if not lease.open and now - lease.heard >= lease.seconds:
                    del self._leases[kind, name]
                    await self._end(kind, name, lease.seconds)

    async def _end(self, kind: str, name: str, seconds: float) -> None:
        log.info("%s %s: no request about it for %g s; its unfinished work is cancelled", kind, name, seconds)
        try:
            await self._cancel[kind](name)
        except Exception:
            log.exception("%s %s could not be cancelled", kind, name)


class Following:
    """Middleware that renews the leases that a request names, if they are the caller's. A job's token renews
    none: a client of one job does not need the rest of its group.

    Args:
        app: the next application, behind the middleware that authenticates the caller.
        leases: of the service.
    """

    def __init__(self, app: ASGIApp, leases: Leases) -> None:
        self._app = app
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._leases:
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["state"]["caller"]
        about = named(scope["path"], scope["query_string"])
        with self._leases.followed({(kind, name) for kind, name in about if caller.leads(name)}):
            await self._app(scope, receive, send)


def named(path: str, query: bytes) -> set[tuple[str, str]]:
    """Return the groups and batches that a request names, by kind and id."""
    _, version, kind, rest = (*path.split("/", 3), "", "", "")[:4]
    if version != "v1":
        return set()
    if kind == "results":
        return {("groups", value) for key, value in parse_qsl(query.decode("latin-1")) if key == "group"}
    for end in _ENDS.get(kind, ()):
        rest = rest.removesuffix(end)
    match kind:
        case "groups" | "batches" if rest:
            return {(kind, rest)}
        case "jobs":
            return {("groups", rest.rpartition("/")[0])}
        case _:
            return set()
