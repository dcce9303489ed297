"""Several model servers as one: added, watched, paused and removed while rollouts run."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import ModelError
from prorl_envs.policy.balance import ServerState
from prorl_envs.policy.gate import Gate
from prorl_envs.policy.parts import in_parts, sample_on
from prorl_envs.policy.protocol import Overloaded, ServerUnavailable
from prorl_envs.policy.routing import Router, RouterSnapshot
from prorl_envs.policy.servers import split_protocol
from prorl_envs.policy.types import (
    Conversation,
    Heard,
    InFlight,
    ModelClient,
    Sampled,
    Sampling,
    Steerable,
)


@dataclass(frozen=True, slots=True)
class Told:
    """What came of telling a server to pause or to go on.

    Args:
        url: of the server.
        supported: it has a way to be told.
        problem: why it did not work, or "".
    """

    url: str
    supported: bool
    problem: str = ""


class ModelPool:
    """Spreads sessions over servers. Implements `policy.types.ModelClient`; `balance.decide` has the rules.

    Args:
        connect: makes the client of a server from its URL, which may name a protocol (`Servers.connect`).
        wait: hold turns until the first server is added; else they fail while there is none.
        router: the state of servers and sessions.
        clock: by default the machine's.
    """

    def __init__(
        self,
        connect: Callable[[str], ModelClient],
        *,
        wait: bool = False,
        router: Router | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._connect = connect
        self._router = router or Router()
        self._clock = clock or SystemClock()
        self._clients: dict[str, ModelClient] = {}
        self._gate = Gate(self._clock)
        self._waiting = wait
        self._pausing = False
        if wait:
            self._gate.close()
        self._idle = asyncio.Event()  # replaced whenever a request ends
        self._calls: dict[asyncio.Future[Sampled], str] = {}
        self._addresses: dict[str, str] = {}
        self._watchers: list[Callable[[], None]] = []
        self._resample = False
        self._weight_version = ""
        self._complaints: dict[str, int] = {}
        self._queue: deque[asyncio.Future[None]] = deque()  # turns for which every server is full

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """The servers as they are now (copies), in the order they were added."""
        return self._router.snapshot().servers

    @property
    def in_flight(self) -> int:
        """Turns that are being sampled."""
        return sum(server.in_flight for server in self._router.servers)

    @property
    def paused(self) -> bool:
        """No turn begins: weights are changing, or the first server is waited for."""
        return self._gate.closed

    @property
    def waiting(self) -> bool:
        """There has been no server yet, and turns are held until there is one."""
        return self._waiting

    @property
    def resampled(self) -> bool:
        """Turns that the last pause broke off begin anew, and do not go on."""
        return self._resample

    @property
    def weight_version(self) -> str:
        """What the last resume named."""
        return self._weight_version

    def paused_s(self) -> float:
        """Seconds for which turns were held, all in all, up to now."""
        return self._gate.closed_s()

    def snapshot(self) -> RouterSnapshot:
        """What the router did, for status and metrics."""
        return self._router.snapshot()

    def protocol(self, url: str) -> str:
        """What a server speaks; "" where that is not known (yet)."""
        client = self._clients.get(url)
        return client.protocol if isinstance(client, Steerable) else ""

    def add(self, url: str) -> str:
        """Take a server in, at once. Adding one twice changes nothing.

        Returns:
            the server's base URL, as `servers` and trajectories name it.

        Raises:
            InputError: not a URL.
        """
        _, base = split_protocol(url)
        if base not in self._clients:
            self._clients[base] = self._connect(url)
            self._addresses[base] = url
        self._router.add(base, version=self._weight_version)
        self._waiting = False
        self._open_if_free()
        return base

    def restore(self, urls: Iterable[str], weight_version: str) -> None:
        """Take in the servers of a pool before this one.

        Args:
            urls: as they were added.
            weight_version: what the last resume named there.

        Raises:
            InputError: not a URL.
        """
        self._weight_version = weight_version
        for url in urls:
            self.add(url)

    async def remove(self, url: str, *, wait_s: float = 0.0) -> bool:
        """Give a server no more turns. Those in flight end in their own time; sessions move elsewhere.

        Args:
            wait_s: seconds to wait until they have ended.

        Returns:
            whether they have, and the server is gone.
        """
        _, base = split_protocol(url)
        self._router.drain(base)
        await self._close_drained(base)
        return await self._until(lambda: base not in self._clients, wait_s)

    async def clear(self) -> None:
        """Remove every server."""
        for server in self.servers:
            await self.remove(server.url)

    def forget(self, session: str) -> None:
        """A session has ended; its pin is given up."""
        self._router.forget(session)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        heard: Heard | None = None,
    ) -> Sampled:
        """See `ModelClient.generate`. Where a server is unavailable the turn is sampled on another one. A
        turn that was broken off goes on where it was (0027 in docs/decisions), under the weights of then.

        Args:
            conversation: the prompt as messages, for servers that take no ids.
            heard: told of the answer while it is sampled, by servers that can.

        Raises:
            ModelError: there is no server, each one is unavailable, or an answer breaks the protocol.
        """

        async def part(ids: Sequence[int], left: Sampling, told: Heard | None) -> Sampled:
            async def on(url: str) -> Sampled:
                return await sample_on(self._clients[url], ids, left, session, conversation, told)

            return await self.turn(session, len(ids), on)

        return await in_parts(part, prompt_ids, sampling, lambda: self._resample, heard)

    async def turn(self, session: str, tokens: int, sample: Callable[[str], Awaitable[Sampled]]) -> Sampled:
        """Have a turn sampled, or a part of one, on the servers that the router names until one does it.

        Args:
            session: whose turn it is.
            tokens: of its prompt.
            sample: samples on the server with a base URL. Where it does that on another machine, the ids may
                stay there.

        Raises:
            ModelError: as `generate`, or what `sample` raises.
        """
        tried: dict[str, ServerUnavailable] = {}
        while (url := await self._start(session, tried, tokens)) is not None:
            try:
                return await self._on(url, tokens, sample)
            except ServerUnavailable as error:
                if not isinstance(error, Overloaded):  # else it is well, and its window is smaller now
                    self._router.failed(url, self._clock.monotonic())
                tried[url] = error
            finally:
                self._heed(url)
                self._router.end(url)
                self._notify()
                await self._close_drained(url)
        if not tried:
            raise ModelError("there is no model server", hint="add one: --llm URL, or POST /v1/model_servers")
        raise list(tried.values())[-1]

    def address(self, url: str) -> str:
        """A server's URL as it was added, its protocol in front where one was named."""
        return self._addresses[url]

    def version_of(self, url: str) -> str:
        """The version of a server's weights, as it was last heard; "" where it is not known."""
        return next((s.weight_version for s in self._router.servers if s.url == url), "")

    def complained(self, url: str) -> None:
        """A server said on another machine that it has too much to do."""
        self._router.complained(url, self._clock.monotonic())

    def watch(self, told: Callable[[], None]) -> None:
        """Have `told` called whenever turns begin or cease to be held (`paused`), or to be `resampled`."""
        self._watchers.append(told)

    async def pause(self, mode: InFlight, *, resample: bool = False, wait_s: float = 0.0) -> list[Told]:
        """Begin no turn any more, and treat those in flight as `mode` says; returns once the servers are told
        and, but for `keep`, the turns in flight have ended.

        Args:
            mode: `finish` lets them end; `abort` ends them, and what they sampled is kept; `keep` freezes
                them in the server. A server that cannot be told to abort is hung up on; one that cannot
                freeze goes on.
            resample: throw away what aborted turns had sampled instead of going on from it.
            wait_s: seconds to wait for turns in flight.
        """
        self._gate.close()
        self._pausing, self._resample = True, resample
        self._tell_watchers()
        told: list[Told] = []
        if mode != "finish":
            told = await self._tell(lambda client: client.pause(mode))
        if mode == "abort":
            deaf = {answer.url for answer in told if not answer.supported or answer.problem}
            for call, url in list(self._calls.items()):
                if url in deaf:
                    call.cancel()
        if mode != "keep":
            await self._until(lambda: self.in_flight == 0, wait_s)
        return told

    async def resume(self, weight_version: str = "") -> list[Told]:
        """Tell the servers to go on, then let turns begin.

        Args:
            weight_version: of the weights from now on; "" leaves it to the servers to say.
        """
        told = await self._tell(lambda client: client.resume(weight_version))
        if weight_version:
            self._weight_version = weight_version
            self._router.forget_prefixes()
            for server in self._router.servers:
                server.weight_version = weight_version
        self._pausing = False
        self._open_if_free()
        return told

    async def look(self, url: str) -> bool:
        """Ask a server how it is, and act on it: one that answers gets turns again, one that fails none.

        Returns:
            whether it is well; True also for one that cannot be asked.
        """
        client = self._clients.get(url)
        if not isinstance(client, Steerable):
            return True
        try:
            news = await client.look()
        except ServerUnavailable:
            if url in self._clients:
                self._router.failed(url, self._clock.monotonic())
            return False
        except ModelError:
            return False  # it answers, only not to this
        if url in self._clients:
            self._router.succeeded(url, version=news.weight_version)
        return True

    async def aclose(self) -> None:
        """Close every client, those of draining servers included; generations in flight end."""
        for server in self.servers:
            self._router.drain(server.url)
        self._gate.open()
        for room in self._queue:
            if not room.done():
                room.set_result(None)
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()

    async def _start(self, session: str, tried: dict[str, ServerUnavailable], tokens: int) -> str | None:
        while True:
            await self._gate.passed()  # also where a server failed in a pause: the next one is paused too
            if not self._router.saturated(self._clock.monotonic(), tried):
                break
            await self._wait_for_room()
        return self._router.start(session, self._clock.monotonic(), tried, tokens=tokens)

    async def _wait_for_room(self) -> None:
        """Return once a call has ended, first come first served."""
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(room)
        try:
            await room
        except asyncio.CancelledError:
            if room.done() and not room.cancelled():
                self._call_next()  # the room was ours, and we do not want it any more
            raise

    def _call_next(self) -> None:
        while self._queue:
            room = self._queue.popleft()
            if not room.done():
                room.set_result(None)
                return

    def _heed(self, url: str) -> None:
        """Take what the server complained of since the last call into account."""
        client = self._clients.get(url)
        complaints = client.complaints if isinstance(client, Steerable) else 0
        if complaints > self._complaints.get(url, 0):
            self._router.complained(url, self._clock.monotonic())
        self._complaints[url] = complaints

    async def _on(self, url: str, tokens: int, sample: Callable[[str], Awaitable[Sampled]]) -> Sampled:
        """Sample on one server. A call that a pause hangs up on counts as aborted with nothing sampled."""
        known = self.version_of(url)
        call = asyncio.ensure_future(sample(url))
        self._calls[call] = url
        try:
            await asyncio.wait({call})
        finally:
            del self._calls[call]
            if not call.done():
                call.cancel()
                await asyncio.wait({call})
        if call.cancelled():
            return Sampled((), (), "abort", known, url)
        sampled = call.result()
        self._router.succeeded(
            url,
            tokens=tokens,
            cached=sampled.cached_tokens,
            version=(sampled.version_spans[-1].version if sampled.version_spans else sampled.weight_version),
        )
        return sampled if sampled.weight_version else replace(sampled, weight_version=known)

    async def _tell(self, what: Callable[[Steerable], Awaitable[bool]]) -> list[Told]:
        async def one(url: str, client: ModelClient) -> Told:
            if not isinstance(client, Steerable):
                return Told(url, supported=False)
            try:
                return Told(url, supported=await what(client))
            except ModelError as error:
                return Told(url, supported=True, problem=error.message)

        return list(await asyncio.gather(*(one(url, client) for url, client in self._clients.items())))

    async def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is so; whether it is."""
        try:
            async with self._clock.timeout(seconds):
                while not holds():
                    await self._idle.wait()
        except TimeoutError:
            pass
        return holds()

    def _open_if_free(self) -> None:
        """Let turns begin, unless something still holds them."""
        if self._gate.closed and not self._pausing and not self._waiting:
            self._gate.open()
            self._tell_watchers()

    def _tell_watchers(self) -> None:
        for told in self._watchers:
            told()

    def _notify(self) -> None:
        self._call_next()
        if not self._router.saturated(self._clock.monotonic()):
            self._call_next()  # a window has grown
        self._idle.set()
        self._idle = asyncio.Event()

    async def _close_drained(self, url: str) -> None:
        if url in self._clients and all(server.url != url for server in self._router.servers):
            self._complaints.pop(url, None)
            self._addresses.pop(url, None)
            await self._clients.pop(url).aclose()
            self._notify()
