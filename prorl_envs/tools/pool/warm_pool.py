"""Warm pool: idle sandboxes, each with a shell that has answered, ready for the next request.

The number per kind follows recent requests (`pool_size.py`), within one limit over all kinds. The pool starts
one sandbox at a time, so that it does not compete with waiting requests.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from prorl_envs.errors import NoRoom, RolloutFailure
from prorl_envs.sandbox.base import Driver, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.pool_size import Demand
from prorl_envs.tools.pool.sandbox_session import SandboxSession

logger = logging.getLogger(__name__)

#: Seconds for which a burst is remembered and an unused sandbox is kept.
MEMORY_S = 60.0
#: Maximum number of kinds whose demand is remembered.
KINDS = 256
_READY_TIMEOUT_S = 30.0
#: Seconds for a caller's first steps in its sandbox, before the pool starts the next sandbox.
_PAUSE_S = 0.01
#: Seconds between two attempts to start a sandbox if a limit of the machine is reached.
_NO_ROOM_S = 0.25


@dataclass(frozen=True, slots=True)
class _Kind:
    """Key of interchangeable sandboxes."""

    spec: SandboxSpec
    python: PythonEngine

    def __hash__(self) -> int:
        return hash((self.spec.image, self.spec.workdir, self.spec.mounts, self.python))


@dataclass(slots=True)
class _Stock:
    demand: Demand
    ready: deque[tuple[float, SandboxSession]] = field(default_factory=deque)


class WarmPool:
    """Warm pool of sandbox sessions; created and closed by one owner, in one event loop.

    If a limit of the machine is reached, starts wait until other sandboxes of the driver have closed.

    Args:
        driver: starts the sandboxes; its owner closes it after the pool.
        limit: maximum number of idle sandboxes over all kinds; 0 disables the pool.
        memory_s: seconds for which unused sandboxes are kept.
        max_concurrent_starts: maximum concurrent starts over all kinds; others wait in order of arrival.
    """

    def __init__(
        self, driver: Driver, *, limit: int, memory_s: float = MEMORY_S, max_concurrent_starts: int = 64
    ) -> None:
        self._driver = driver
        self._start_slots = asyncio.Semaphore(max_concurrent_starts)
        self._limit = limit
        self._memory_s = memory_s
        self._stocks: OrderedDict[_Kind, _Stock] = OrderedDict()
        self._woken = asyncio.Event()
        self._settled = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = self._warned = False
        #: Number of requests served from the pool.
        self.hits = 0
        #: Number of sandboxes that start now, and number of starts that wait for a slot.
        self.starting = self.waiting = 0

    @property
    def ready(self) -> int:
        """Number of idle sandboxes."""
        return sum(len(stock.ready) for stock in self._stocks.values())

    @property
    def ready_sandboxes(self) -> frozenset[str]:
        """Ids of the idle sandboxes."""
        return frozenset(session.sandbox.id for stock in self._stocks.values() for _, session in stock.ready)

    async def take(self, spec: SandboxSpec, *, python: PythonEngine = PythonEngine.NONE) -> SandboxSession:
        """Return an unused session: an idle one, or a new one. The caller closes it.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        kind = _Kind(spec, python)
        if self._limit == 0 or self._closed:
            return await self._open(kind)
        stock = self._stock(kind)
        stock.demand.taken(time.monotonic())
        self._wake()
        while stock.ready:
            _, session = stock.ready.popleft()
            if session.sandbox.alive:
                self.hits += 1
                return session
            await session.aclose()
        return await self._open(kind)

    async def settled(self) -> None:
        """Wait until the pool has its target size, or cannot grow further."""
        while self._woken.is_set():
            self._settled.clear()
            await self._settled.wait()

    async def aclose(self) -> None:
        """Close the idle sandboxes. Idempotent."""
        self._closed = True
        if self._keeper is not None:
            # Not cancelled: a start or close in progress would remain incomplete.
            self._woken.set()
            await asyncio.shield(self._keeper)
        for stock in self._stocks.values():
            while stock.ready:
                await stock.ready.popleft()[1].aclose()

    def _stock(self, kind: _Kind) -> _Stock:
        stock = self._stocks.pop(kind, None) or _Stock(Demand(self._memory_s))
        self._stocks[kind] = stock  # least recently requested kinds are dropped first
        if len(self._stocks) > KINDS:
            oldest = next(iter(self._stocks))
            if not self._stocks[oldest].ready:
                del self._stocks[oldest]
        return stock

    def _wake(self) -> None:
        self._woken.set()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def _open(self, kind: _Kind, *, waits: bool = True) -> SandboxSession:
        self.waiting += 1
        try:
            await self._start_slots.acquire()
        finally:
            self.waiting -= 1
        self.starting += 1
        started = time.monotonic()
        try:
            session = await self._start(kind, waits=waits)
        finally:
            self.starting -= 1
            self._start_slots.release()
        if kind in self._stocks:
            self._stocks[kind].demand.started(time.monotonic() - started)
        return session

    async def _start(self, kind: _Kind, *, waits: bool) -> SandboxSession:
        while True:
            try:
                return await SandboxSession.open(self._driver, kind.spec, python=kind.python)
            except NoRoom as error:
                if not waits or not self._driver.sandboxes:
                    raise
                if not self._warned:
                    logger.warning("sandboxes wait until others close: %s", error)
                    self._warned = True
            idle = next((stock.ready for stock in self._stocks.values() if stock.ready), None)
            if idle is None:
                await asyncio.sleep(_NO_ROOM_S)
            else:  # it has the room
                await idle.popleft()[1].aclose()

    async def _keep(self) -> None:
        """Start missing sandboxes and close unneeded ones while the pool is open."""
        while not self._closed:
            while (session := self._pop_unwanted(time.monotonic())) is not None:
                await session.aclose()
            kind = self._missing_kind(time.monotonic())
            if kind is not None and self.ready < self._limit and await self._fill(kind):
                continue
            if self._closed:
                break
            self._woken.clear()
            self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._memory_s / 4):
                    await self._woken.wait()
                    await asyncio.sleep(_PAUSE_S)
        self._settled.set()

    def _pop_unwanted(self, now: float) -> SandboxSession | None:
        """Remove and return an idle sandbox that is too old, surplus, or takes the place of another kind."""
        missing = self._missing_kind(now)
        replaceable = missing is not None and self.ready >= self._limit
        for kind, stock in self._stocks.items():  # least recently requested kinds first
            if kind == missing:
                replaceable = False
            if not stock.ready:
                continue
            since, session = stock.ready[0]
            if replaceable or since < now - self._memory_s or len(stock.ready) > stock.demand.wanted(now):
                stock.demand.unused()
                stock.ready.popleft()
                return session
        return None

    def _missing_kind(self, now: float) -> _Kind | None:
        """Return the most recently requested kind that is below its target."""
        stocks = reversed(self._stocks.items())
        return next((kind for kind, stock in stocks if len(stock.ready) < stock.demand.wanted(now)), None)

    async def _fill(self, kind: _Kind) -> bool:
        try:
            session = await self._open(kind, waits=False)
        except RolloutFailure as error:
            # No caller waits here; a later request that fails raises its own error.
            logger.warning("a sandbox for the warm pool could not be started: %s", error)
            return False
        try:
            await session.tools.bash(":", timeout_s=_READY_TIMEOUT_S)
        except RolloutFailure as error:
            logger.warning("a sandbox for the warm pool does not answer: %s", error)
            await session.aclose()
            return False
        stock = self._stocks.get(kind)
        if stock is None or self._closed:
            await session.aclose()
            return False
        stock.ready.append((time.monotonic(), session))
        return True
