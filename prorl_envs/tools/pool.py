"""Sandboxes that stand ready, with a shell that has answered, for whoever asks next.

Which kinds, and how many of each, follows what was asked for of late (`demand.py`) and what is said to come
soon, within one bound over all kinds. They are started one at a time, beside the work: a pool must not
compete with those who wait.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field

from prorl_envs.errors import RolloutFailure
from prorl_envs.sandbox.base import Driver, SandboxSpec
from prorl_envs.tools.demand import Demand
from prorl_envs.tools.starts import Starts
from prorl_envs.tools.workplace import Workplace

logger = logging.getLogger(__name__)

#: Seconds that a burst is remembered and an unused sandbox stands ready.
MEMORY_S = 60.0
#: Kinds whose demand is remembered.
KINDS = 256
_READY_TIMEOUT_S = 30.0
#: Seconds that whoever took one has for its first steps before the next is started.
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class _Kind:
    """What makes one sandbox as good as another."""

    spec: SandboxSpec
    python: bool

    def __hash__(self) -> int:
        return hash((self.spec.image, self.spec.workdir, self.spec.mounts, self.python))


@dataclass(slots=True)
class _Stock:
    demand: Demand
    expected: deque[float] = field(default_factory=deque)  # when it was said that one will be asked for
    ready: deque[tuple[float, Workplace]] = field(default_factory=deque)


class WarmPool:
    """Hands out workplaces; made and closed by one owner, in one event loop.

    Args:
        driver: starts the sandboxes; stays its owner's, who closes it after the pool.
        limit: most that stand ready, over all kinds; 0 keeps none.
        memory_s: seconds that unused ones stand ready.
        starts: lets starts through; None lets all.
    """

    def __init__(
        self, driver: Driver, *, limit: int, memory_s: float = MEMORY_S, starts: Starts | None = None
    ) -> None:
        self._driver = driver
        self._starts = starts
        self._limit = limit
        self._memory_s = memory_s
        self._stocks: OrderedDict[_Kind, _Stock] = OrderedDict()
        self._asked = asyncio.Event()
        self._settled = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._filling: tuple[_Kind, asyncio.Future[None]] | None = None
        #: How often one that stood ready was handed out.
        self.hits = 0

    @property
    def ready(self) -> int:
        """How many stand ready."""
        return sum(len(stock.ready) for stock in self._stocks.values())

    @property
    def ready_sandboxes(self) -> frozenset[str]:
        """The ids of those that stand ready."""
        return frozenset(place.sandbox.id for stock in self._stocks.values() for _, place in stock.ready)

    async def take(self, spec: SandboxSpec, *, python: bool = False) -> Workplace:
        """A workplace that nobody has used: one that stands ready, or a new one. The caller closes it.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        kind = _Kind(spec, python)
        if self._limit == 0 or self._closed:
            return await self._open(kind)
        stock = self._stock(kind)
        stock.demand.taken(time.monotonic())
        if stock.expected and self._filling and self._filling[0] == kind:  # for whoever asks now
            await asyncio.wait([self._filling[1]])
        if stock.expected:
            stock.expected.popleft()
        self._wake()
        while stock.ready:
            _, place = stock.ready.popleft()
            if place.sandbox.alive:
                self.hits += 1
                return place
            await place.aclose()
        return await self._open(kind)

    def expect(self, spec: SandboxSpec, *, python: bool = False) -> None:
        """One will be asked for soon: have it ready, where there is room and time."""
        if self._limit > 0 and not self._closed:
            self._stock(_Kind(spec, python)).expected.append(time.monotonic())
            self._wake()

    def expect_no_more(self, spec: SandboxSpec, *, python: bool = False) -> None:
        """Who was expected does not come."""
        stock = self._stocks.get(_Kind(spec, python))
        if stock is not None and stock.expected:
            stock.expected.pop()
            self._wake()

    async def settled(self) -> None:
        """Return once as many stand ready as are wanted, or as can be had."""
        while self._asked.is_set():
            self._settled.clear()
            await self._settled.wait()

    async def aclose(self) -> None:
        """Close what stands ready. Idempotent."""
        self._closed = True
        if self._keeper is not None:
            # Not cancelled: what it starts or closes at this moment would be left half done.
            self._asked.set()
            await asyncio.shield(self._keeper)
        for stock in self._stocks.values():
            while stock.ready:
                await stock.ready.popleft()[1].aclose()

    def _stock(self, kind: _Kind) -> _Stock:
        stock = self._stocks.pop(kind, None) or _Stock(Demand(self._memory_s))
        self._stocks[kind] = stock  # last asked for, last forgotten
        if len(self._stocks) > KINDS:
            oldest = next(iter(self._stocks))
            if not self._stocks[oldest].ready:
                del self._stocks[oldest]
        return stock

    def _wake(self) -> None:
        self._asked.set()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def _open(self, kind: _Kind) -> Workplace:
        async with self._starts.turn(kind) if self._starts else nullcontext():
            started = time.monotonic()
            place = await Workplace.open(self._driver, kind.spec, python=kind.python)
        if kind in self._stocks:
            self._stocks[kind].demand.started(time.monotonic() - started)
        return place

    async def _keep(self) -> None:
        """Fill up what is wanted and let go of what is not, for as long as the pool is open."""
        while not self._closed:
            while (place := self._unwanted(time.monotonic())) is not None:
                await place.aclose()
            kind = self._short(time.monotonic())
            if kind is not None and self.ready < self._limit and await self._fill(kind):
                continue
            if self._closed:
                break
            self._asked.clear()
            self._settled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._memory_s / 4):
                    await self._asked.wait()
                    await asyncio.sleep(_PAUSE_S)
        self._settled.set()

    def _unwanted(self, now: float) -> Workplace | None:
        """One that stands ready and should not: too old, too many, or in the way of others."""
        short = self._short(now)
        in_the_way = self.ready >= self._limit
        for kind, stock in self._stocks.items():  # what was asked for longest ago comes first
            if kind == short:
                in_the_way = False
            if not stock.ready:
                continue
            since, place = stock.ready[0]
            crowding = in_the_way and short is not None and not stock.expected
            if crowding or since < now - self._memory_s or len(stock.ready) > self._wanted(stock, now):
                stock.demand.unused()
                stock.ready.popleft()
                return place
        return None

    def _short(self, now: float) -> _Kind | None:
        """The kind of which more should stand ready: the one expected first, else the one asked for last."""
        short = [kind for kind, stock in self._stocks.items() if len(stock.ready) < self._wanted(stock, now)]
        expected = [kind for kind in short if self._stocks[kind].expected]
        if expected:
            return min(expected, key=lambda kind: self._stocks[kind].expected[0])
        return short[-1] if short else None

    def _wanted(self, stock: _Stock, now: float) -> int:
        """How many of a kind should stand ready."""
        while stock.expected and stock.expected[0] < now - self._memory_s:
            stock.expected.popleft()
        return stock.demand.wanted(now) + len(stock.expected)

    async def _fill(self, kind: _Kind) -> bool:
        self._filling = kind, asyncio.get_running_loop().create_future()
        try:
            return await self._try_fill(kind)
        finally:
            self._filling[1].set_result(None)
            self._filling = None

    async def _try_fill(self, kind: _Kind) -> bool:
        try:
            place = await self._open(kind)
        except RolloutFailure as error:
            # Whoever asks for one will be told; here nobody waits.
            logger.warning("a sandbox to stand ready could not be started: %s", error)
            return False
        try:
            await place.tools.bash(":", timeout_s=_READY_TIMEOUT_S)
        except RolloutFailure as error:
            logger.warning("a sandbox to stand ready does not answer: %s", error)
            await place.aclose()
            return False
        stock = self._stocks.get(kind)
        if stock is None or self._closed:
            await place.aclose()
            return False
        stock.ready.append((time.monotonic(), place))
        return True
