"""Pool of model servers behind one client: added, checked, paused and removed while rollouts run."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import Overloaded, Refusal, RouteRefused, ServerUnavailable
from prorl_envs.model.routing.balance import ServerState
from prorl_envs.model.routing.pause_gate import PauseGate
from prorl_envs.model.routing.resumable_turn import in_parts, sample_on
from prorl_envs.model.routing.state import Router, RouterSnapshot
from prorl_envs.model.servers.detect import split_protocol
from prorl_envs.model.types import (
    ControllableServer,
    Conversation,
    InFlight,
    ModelClient,
    OnPartial,
    Sampled,
    Sampling,
)


@dataclass(frozen=True, slots=True)
class ServerAck:
    """Outcome of a pause or resume request to a server.

    Args:
        url: base URL of the server.
        supported: whether the server supports such requests.
        problem: why the request failed, or "".
    """

    url: str
    supported: bool
    problem: str = ""


class ModelPool:
    """Client that spreads sessions over servers. Implements `model.types.ModelClient`; see `balance.decide`.

    Args:
        connect: makes the client of a server from its URL, which may name a protocol (`Servers.connect`).
        wait: True holds turns until a server has answered; otherwise turns fail while there is no server.
        router: state of servers and sessions.
        clock: by default the machine's clock.
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
        self._gate = PauseGate(self._clock)
        self._waiting = wait
        self._pausing = False
        if wait:
            self._gate.close()
        self._idle = asyncio.Event()  # replaced when a request finishes
        self._calls: dict[asyncio.Future[Sampled], str] = {}
        self._addresses: dict[str, str] = {}
        self._watchers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._notices: set[asyncio.Task[None]] = set()
        self._resample = False
        self._weight_version = ""
        self._complaints: dict[str, int] = {}
        self._queue: deque[asyncio.Future[None]] = deque()  # turns that wait because every server is full

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """Current servers (copies), in the order they were added."""
        return self._router.snapshot().servers

    @property
    def in_flight(self) -> int:
        """Number of turns that are being sampled."""
        return sum(server.in_flight for server in self._router.servers)

    @property
    def paused(self) -> bool:
        """True if turns are held: weights are changing, or no server has answered yet."""
        return self._gate.closed

    @property
    def waiting(self) -> bool:
        """True if no server has answered yet, and turns are held until one does."""
        return self._waiting

    @property
    def resampled(self) -> bool:
        """True if turns that the last pause interrupted start again instead of continuing."""
        return self._resample

    @property
    def weight_version(self) -> str:
        """Version that the last resume named."""
        return self._weight_version

    def paused_s(self) -> float:
        """Return the total seconds for which turns were held so far."""
        return self._gate.closed_s()

    def snapshot(self) -> RouterSnapshot:
        """Return the router's counts, for status and metrics."""
        return self._router.snapshot()

    def protocol(self, url: str) -> str:
        """Return the protocol of a server; "" if it is not known (yet)."""
        client = self._clients.get(url)
        return client.protocol if isinstance(client, ControllableServer) else ""

    def add(self, url: str) -> str:
        """Add a server. Idempotent.

        If turns are held until a first answer, they start after a successful health check (`check`), or at
        once if the server has no health checks.

        Returns:
            the server's base URL, as in `servers` and in trajectories.

        Raises:
            InputError: not a URL.
        """
        _, base = split_protocol(url)
        if base not in self._clients:
            self._clients[base] = self._connect(url)
            self._addresses[base] = url
        self._router.add(base, version=self._weight_version)
        if not isinstance(self._clients[base], ControllableServer):
            self._stop_waiting()
        return base

    def restore(self, urls: Iterable[str], weight_version: str) -> None:
        """Add the servers of the pool that preceded this one.

        Args:
            urls: URLs as passed to `add`.
            weight_version: version that the last resume of that pool named.

        Raises:
            InputError: not a URL.
        """
        self._weight_version = weight_version
        for url in urls:
            self.add(url)

    async def remove(self, url: str, *, wait_s: float = 0.0) -> bool:
        """Drain a server: it gets no more turns, its turns in flight finish, and its sessions move elsewhere.

        Args:
            wait_s: seconds to wait for turns in flight.

        Returns:
            True if its turns have finished and the server is removed.
        """
        _, base = split_protocol(url)
        self._router.drain(base)
        await self._close_drained(base)
        return await self._wait_until(lambda: base not in self._clients, wait_s)

    async def clear(self) -> None:
        """Remove every server."""
        for server in self.servers:
            await self.remove(server.url)

    def forget(self, session: str) -> None:
        """Release the pin of a closed session."""
        self._router.forget(session)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        conversation: Conversation | None = None,
        on_partial: OnPartial | None = None,
    ) -> Sampled:
        """Sample as `ModelClient.generate` does. If a server is unavailable, another server samples the turn.
        An interrupted turn continues from its sampled ids with current weights (decisions/model-servers.md).

        Args:
            conversation: the prompt as messages, for servers that take no ids.
            on_partial: receives the partial answer during sampling, if the server supports it.

        Raises:
            ModelError: there is no server, each one is unavailable, or an answer breaks the protocol.
        """

        async def part(ids: Sequence[int], remaining: Sampling, listener: OnPartial | None) -> Sampled:
            async def sample(url: str) -> Sampled:
                return await sample_on(self._clients[url], ids, remaining, session, conversation, listener)

            return await self.turn(session, len(ids), sample)

        return await in_parts(part, prompt_ids, sampling, lambda: self._resample, on_partial)

    async def turn(self, session: str, tokens: int, sample: Callable[[str], Awaitable[Sampled]]) -> Sampled:
        """Sample a turn, or a part of one, on the servers that the router chooses, until one succeeds.

        Args:
            session: session of the turn.
            tokens: length of the prompt.
            sample: samples on the server with the given base URL. If it samples on another machine, the ids
                may stay on that machine.

        Raises:
            ModelError: as `generate`, or as `sample` raises it.
        """
        tried: dict[str, ServerUnavailable] = {}
        while (url := await self._start(session, tried, tokens)) is not None:
            try:
                return await self._sample_on(url, tokens, sample)
            except ServerUnavailable as error:
                if not isinstance(
                    error, Overloaded
                ):  # an overloaded server is healthy, and gets a smaller window
                    self._failed(url, error, of_turn=True)
                tried[url] = error
            finally:
                self._record_overload(url)
                self._router.end(url)
                self._wake_waiters()
                await self._close_drained(url)
        if not tried:
            raise ModelError("there is no model server", hint="add one: --llm URL, or POST /v1/model_servers")
        raise list(tried.values())[-1]

    def address(self, url: str) -> str:
        """Return a server's URL as it was added, with the protocol prefix if it had one."""
        return self._addresses[url]

    def version_of(self, url: str) -> str:
        """Return the last known version of a server's weights; "" if unknown."""
        return next((s.weight_version for s in self._router.servers if s.url == url), "")

    def complained(self, url: str) -> None:
        """Record that a server answered another machine with an overload error."""
        self._router.complained(url, self._clock.monotonic())

    def watch(self, callback: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register a callback for each change of `paused` or `resampled`; `pause` and `resume` await it."""
        self._watchers.append(callback)

    async def pause(self, mode: InFlight, *, resample: bool = False, wait_s: float = 0.0) -> list[ServerAck]:
        """Hold new turns, and treat turns in flight according to `mode`. Return after the servers have been
        notified and, except for `keep`, the turns in flight have finished.

        Args:
            mode: `finish` lets turns in flight finish; `abort` stops them and keeps the sampled ids; `keep`
                freezes them in the server. If a server cannot abort, its calls are cancelled; if it cannot
                freeze, its turns continue.
            resample: discard the sampled ids of aborted turns instead of continuing from them.
            wait_s: seconds to wait for turns in flight.
        """
        self._gate.close()
        self._pausing, self._resample = True, resample
        self._notify_watchers()
        await self._watchers_finished()
        acks: list[ServerAck] = []
        if mode != "finish":
            acks = await self._send_to_all(lambda client: client.pause(mode))
        if mode == "abort":
            not_aborted = {ack.url for ack in acks if not ack.supported or ack.problem}
            for call, url in list(self._calls.items()):
                if url in not_aborted:
                    call.cancel()
        if mode != "keep":
            await self._wait_until(lambda: self.in_flight == 0, wait_s)
        return acks

    async def resume(self, weight_version: str = "") -> list[ServerAck]:
        """Notify the servers to resume, then let turns start.

        Args:
            weight_version: version of the new weights; "" relies on the versions that servers report.
        """
        acks = await self._send_to_all(lambda client: client.resume(weight_version))
        if weight_version:
            self._weight_version = weight_version
            self._router.forget_prefixes()
            for server in self._router.servers:
                server.weight_version = weight_version
        self._pausing = False
        self._open_if_free()
        await self._watchers_finished()
        return acks

    async def check(self, url: str) -> bool:
        """Send a health check: a server that answers gets turns again, a server that fails gets none.

        Returns:
            True if the server is healthy or has no health checks.
        """
        client = self._clients.get(url)
        if not isinstance(client, ControllableServer):
            return True
        try:
            news = await client.look()
        except ModelError as error:
            if url in self._clients and self._predicts_failure(url, error):
                self._failed(url, error)
            return False
        if url in self._clients:
            self._router.checked(url, version=news.weight_version)
            self._stop_waiting()
        return True

    async def aclose(self) -> None:
        """Close every client, including those of draining servers; this stops generations in flight."""
        for server in self.servers:
            self._router.drain(server.url)
        self._gate.open()
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_result(None)
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()

    async def _start(self, session: str, tried: dict[str, ServerUnavailable], tokens: int) -> str | None:
        while True:
            await self._gate.passed()  # a pause may have begun since the last attempt
            if not self._router.saturated(self._clock.monotonic(), tried):
                break
            await self._wait_for_room()
        return self._router.start(session, self._clock.monotonic(), tried, tokens=tokens)

    async def _wait_for_room(self) -> None:
        """Return once a call has finished, first come first served."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake_next()  # this call's turn goes to the next waiter
            raise

    def _wake_next(self) -> None:
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _record_overload(self, url: str) -> None:
        """Reduce the server's window if it has reported overload since the previous turn."""
        client = self._clients.get(url)
        complaints = client.complaints if isinstance(client, ControllableServer) else 0
        if complaints > self._complaints.get(url, 0):
            self._router.complained(url, self._clock.monotonic())
        self._complaints[url] = complaints

    async def _sample_on(self, url: str, tokens: int, sample: Callable[[str], Awaitable[Sampled]]) -> Sampled:
        """Sample on one server. A call that a pause cancels counts as aborted with nothing sampled."""
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
            if not call.cancelled():
                call.exception()  # marks it as retrieved, in case this turn is cancelled
        if call.cancelled():
            return Sampled((), (), "abort", known, url)
        sampled = call.result()
        self._router.succeeded(
            url, tokens=tokens, cached=sampled.cached_tokens, version=sampled.newest_version
        )
        return sampled if sampled.weight_version else replace(sampled, weight_version=known)

    async def _send_to_all(self, send: Callable[[ControllableServer], Awaitable[bool]]) -> list[ServerAck]:
        async def send_to(url: str, client: ModelClient) -> ServerAck:
            if not isinstance(client, ControllableServer):
                return ServerAck(url, supported=False)
            try:
                return ServerAck(url, supported=await send(client))
            except ModelError as error:
                return ServerAck(url, supported=True, problem=error.message)

        return list(await asyncio.gather(*(send_to(url, client) for url, client in self._clients.items())))

    async def _wait_until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until `holds` returns True, for at most `seconds`. Return its last value."""
        try:
            async with self._clock.timeout(seconds):
                while not holds():
                    await self._idle.wait()
        except TimeoutError:
            pass
        return holds()

    def _predicts_failure(self, url: str, error: ModelError) -> bool:
        """Return true if a failed health check means that turns would fail. Some servers refuse health checks
        but answer turns, so a refusal does not count after the server's first turn."""
        sampled = any(server.sampled for server in self._router.servers if server.url == url)
        return isinstance(error, ServerUnavailable) and not (sampled and isinstance(error, Refusal))

    def _failed(self, url: str, error: ModelError, *, of_turn: bool = False) -> None:
        self._router.failed(
            url,
            self._clock.monotonic(),
            problem=error.message,
            refused=of_turn and isinstance(error, RouteRefused),
        )

    def _stop_waiting(self) -> None:
        self._waiting = False
        self._open_if_free()

    def _open_if_free(self) -> None:
        """Let turns start, unless a pause or a missing first answer still holds them."""
        if self._gate.closed and not self._pausing and not self._waiting:
            self._gate.open()
            self._notify_watchers()

    def _notify_watchers(self) -> None:
        for callback in self._watchers:
            notice = asyncio.create_task(callback())
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    async def _watchers_finished(self) -> None:
        """Return when all callbacks of watchers have finished."""
        while self._notices:
            await asyncio.wait(set(self._notices))

    def _wake_waiters(self) -> None:
        self._wake_next()
        if not self._router.saturated(self._clock.monotonic()):
            self._wake_next()  # the window may have grown
        self._idle.set()
        self._idle = asyncio.Event()

    async def _close_drained(self, url: str) -> None:
        if url in self._clients and all(server.url != url for server in self._router.servers):
            self._complaints.pop(url, None)
            self._addresses.pop(url, None)
            await self._clients.pop(url).aclose()
            self._wake_waiters()
