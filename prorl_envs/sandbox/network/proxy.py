"""HTTP proxy of sandboxes with an allowlist, in the event loop of the process that runs the sandboxes.

It listens on a socket that was created in the sandbox's network namespace, and connects from the host's. None
of its code runs inside. Clients are hostile: heads, connections, waiting times and memory are bounded, and a
client that does not read delays only its own connection.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.linux.pidfd import not_in_forks, readable
from prorl_envs.sandbox.network.policy import Address, Policy, Target
from prorl_envs.sandbox.network.proxy_request import ProxyRefused, ProxyRequest, parse_request

logger = logging.getLogger(__name__)

#: Resolves a name to its addresses. Raises OSError if the name has none.
type Resolver = Callable[[str], Awaitable[Iterable[str]]]
#: Connects to the server of a relay. Raises OSError or SandboxError if that fails.
type Connector = Callable[[], Awaitable[socket.socket]]

_CHUNK = 64 * 1024
_LINGER_BYTES, _LINGER_S = 256 * 1024, 2.0
_RETRY_S = 0.2
_ADDRESSES = 8
_MOST_CONNECTIONS = 1 << 16
_LOGGED_REFUSALS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Limits for the clients of a proxy.

    Args:
        connections: simultaneous connections per sandbox; further ones wait in the kernel's queue.
        lookups: simultaneous name lookups per sandbox.
        head_bytes: size of a request's head.
        head_s: seconds until the head must have arrived.
        connect_s: seconds for the lookup and the connection.
        idle_s: seconds without traffic after which a connection is closed.
    """

    connections: int = 32
    lookups: int = 2
    head_bytes: int = 16 * 1024
    head_s: float = 30.0
    connect_s: float = 20.0
    idle_s: float = 300.0


class Gateway:
    """Shared state of the proxies of one driver.

    Args:
        limits: limits of each sandbox.
        resolve: resolver of names; None means the host's own.
    """

    def __init__(self, limits: ProxyLimits = ProxyLimits(), resolve: Resolver | None = None) -> None:
        self.limits = limits
        self._resolve = resolve or self._ask_host
        # Two descriptors per connection, and at most a quarter of all descriptors.
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        unlimited = descriptors == resource.RLIM_INFINITY
        self.free = _MOST_CONNECTIONS if unlimited else max(descriptors // 8, limits.connections)
        # Separate threads: lookups that hang must not occupy the service's other threads.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="prorl-lookup")
        self._pending_lookups: set[asyncio.Task[list[Address]]] = set()

    def serve(self, sandbox_id: str, listener: socket.socket, patterns: Iterable[str]) -> "Proxy":
        """Start a proxy for a sandbox, and return it. The caller closes it.

        Args:
            sandbox_id: names the sandbox in the log.
            listener: socket on which the proxy accepts, and which it closes.
            patterns: allowed hosts, see `Policy`.
        """
        return Proxy(self, sandbox_id, listener, Policy(patterns))

    def look_up(self, name: str) -> asyncio.Task[list[Address]]:
        """Look up a name. Do not cancel the task: its thread would continue, and there are few threads."""
        lookup = asyncio.create_task(self._addresses(name))
        self._pending_lookups.add(lookup)
        lookup.add_done_callback(self._finish_lookup)
        return lookup

    async def aclose(self) -> None:
        """Stop lookups, after all proxies are closed. Threads run until the host's timeout. Idempotent."""
        lookups = tuple(self._pending_lookups)
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _finish_lookup(self, lookup: asyncio.Task[list[Address]]) -> None:
        self._pending_lookups.discard(lookup)
        if not lookup.cancelled():
            lookup.exception()  # marks it as retrieved, because the caller may have stopped waiting

    async def _addresses(self, name: str) -> list[Address]:
        return [ipaddress.ip_address(text) for text in await self._resolve(name)][:_ADDRESSES]

    async def _ask_host(self, name: str) -> Iterable[str]:
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, name)
        return dict.fromkeys(found)


class Proxy:
    """Proxy of one sandbox. Starts on construction; `aclose` stops it and closes all its connections."""

    def __init__(self, gateway: Gateway, sandbox_id: str, listener: socket.socket, policy: Policy) -> None:
        self._gateway = gateway
        self._limits = gateway.limits
        self._sandbox_id = sandbox_id
        self._policy = policy
        self._listener = listener
        listener.setblocking(False)
        not_in_forks(listener)
        self._slots = asyncio.Semaphore(gateway.limits.connections)
        self._lookups = asyncio.Semaphore(gateway.limits.lookups)
        self._logged: set[str] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def aclose(self) -> None:
        """Close the listening socket and all connections. Idempotent."""
        tasks = (self._accepting, *self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        while True:
            await self._slots.acquire()
            client = await self._next_client()
            client.setblocking(False)
            task = asyncio.create_task(self._serve(client))
            self._serving.add(task)
            task.add_done_callback(functools.partial(self._served, client))

    async def _next_client(self) -> socket.socket:
        while True:
            await readable(self._listener.fileno())
            try:
                return self._listener.accept()[0]
            except (BlockingIOError, ConnectionError):  # the client has disconnected
                continue
            except OSError as error:  # no descriptors or no memory
                logger.warning("the proxy of sandbox %s cannot accept: %s", self._sandbox_id, error)
                await asyncio.sleep(_RETRY_S)

    def _served(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        client.close()  # here, because a task cancelled before its first step never runs
        self._serving.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the proxy of sandbox %s failed", self._sandbox_id, exc_info=error)

    async def _serve(self, client: socket.socket) -> None:
        if self._gateway.free <= 0:
            await self._answer(client, ProxyRefused(503, "too many connections of all sandboxes"))
            return
        self._gateway.free -= 1
        try:
            await self._handle(client)
        except ProxyRefused as refused:
            self._record_refusal(refused)
            await self._answer(client, refused)
        except OSError:  # a side closed the connection, or no data moved for too long
            pass
        finally:
            self._gateway.free += 1

    async def _handle(self, client: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._limits.head_s):
                head, rest = await self._read_head(client)
        except TimeoutError:
            raise ProxyRefused(408, "the request's head did not arrive in time") from None
        request = parse_request(head)
        if reason := self._policy.refusal(request.target):
            raise ProxyRefused(403, reason)
        try:
            async with asyncio.timeout(self._limits.connect_s):
                server = await self._connect(request.target)
        except TimeoutError:
            raise ProxyRefused(504, f"{request.target} does not answer") from None
        with server:
            await self._relay(client, server, request, rest)

    async def _read_head(self, client: socket.socket) -> tuple[bytes, bytes]:
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) >= self._limits.head_bytes:
                raise ProxyRefused(431, "the request's head is too large")
            chunk = await asyncio.get_running_loop().sock_recv(client, self._limits.head_bytes - len(data))
            if not chunk:
                raise ConnectionResetError("ended within the head")
            data += chunk
        return data[: end + 4], data[end + 4 :]

    async def _connect(self, target: Target) -> socket.socket:
        """Connect to an address that was checked, because a second lookup could return another."""
        addresses = [target.address] if target.address else await self._addresses(target)
        for address in addresses:
            if reason := self._policy.address_refusal(target, address, local=_is_local(address)):
                if target.address is None:
                    self._advise(target, address)
                raise ProxyRefused(403, reason)
        for address in addresses:
            # An address that does not answer must leave time for the next.
            with contextlib.suppress(OSError):
                async with asyncio.timeout(self._limits.connect_s / 3):
                    return await _connect(address, target.port)
        raise ProxyRefused(502, f"{target} cannot be reached")

    async def _addresses(self, target: Target) -> list[Address]:
        await self._lookups.acquire()
        lookup = self._gateway.look_up(target.host)
        lookup.add_done_callback(lambda _: self._lookups.release())
        await asyncio.wait([lookup])
        try:
            return lookup.result()
        except (OSError, UnicodeError):
            raise ProxyRefused(502, f"the name {target.host} is not known") from None

    async def _relay(
        self, client: socket.socket, server: socket.socket, request: ProxyRequest, rest: bytes
    ) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.idle_s) as timer:

            def moved() -> None:
                if not timer.expired():
                    timer.reschedule(loop.time() + self._limits.idle_s)

            body = None
            if request.head is None:
                await loop.sock_sendall(client, b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                # Relay only this request and its announced body: the next request may be for another host.
                await loop.sock_sendall(server, request.head)
                rest = rest[: request.body_bytes]
                body = request.body_bytes - len(rest)
            await loop.sock_sendall(server, rest)
            moved()
            await _pump_both(client, server, moved, body)

    def _record_refusal(self, refused: ProxyRefused) -> None:
        # Log each reason once, and a bounded number of reasons: clients could fill the log.
        if refused.reason not in self._logged and len(self._logged) < _LOGGED_REFUSALS:
            self._logged.add(refused.reason)
            logger.info("the proxy of sandbox %s refused: %s", self._sandbox_id, refused.reason)

    def _advise(self, target: Target, address: Address) -> None:
        """Log how to allow an address. The sandbox does not learn the address."""
        advice = f"it leads to {address}; allow private:{target}, or {Target(str(address), target.port)}"
        if advice not in self._logged and len(self._logged) < _LOGGED_REFUSALS:
            self._logged.add(advice)
            logger.warning("the proxy of sandbox %s refused %s: %s", self._sandbox_id, target, advice)

    async def _answer(self, client: socket.socket, refused: ProxyRefused) -> None:
        """Send the reason, then read the rest: a close with unread input would discard the answer."""
        text = f"{refused.reason}\n".encode("ascii", "replace")
        # The status line has the reason too: many clients show nothing else of an answer to CONNECT.
        head = (
            f"HTTP/1.1 {refused.status} {HTTPStatus(refused.status).phrase}: {refused.reason}\r\n"
            f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_LINGER_S):
                await loop.sock_sendall(client, head.encode("ascii", "replace") + text)
                client.shutdown(socket.SHUT_WR)
                unread = _LINGER_BYTES
                while unread > 0 and (data := await loop.sock_recv(client, _CHUNK)):
                    unread -= len(data)


class Relay(Proxy):
    """Listener that passes every connection on to one server, unchanged and without a limit of idle time."""

    def __init__(
        self, gateway: Gateway, sandbox_id: str, listener: socket.socket, connect: Connector
    ) -> None:
        super().__init__(gateway, sandbox_id, listener, Policy(()))
        self._connect_server = connect

    async def _handle(self, client: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._limits.connect_s):
                server = await self._connect_server()
        except (TimeoutError, OSError, SandboxError):
            # A reset, because a normal close would look like an empty answer.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        with server:
            await _pump_both(client, server, lambda: None)


async def _pump_both(
    client: socket.socket, server: socket.socket, moved: Callable[[], None], body: int | None = None
) -> None:
    """Copy in both directions until both have ended; with a `body`, that many bytes and the whole answer."""
    try:
        async with asyncio.TaskGroup() as group:
            up = group.create_task(_pump(client, server, moved, body))
            await _pump(server, client, moved)
            if body is not None:
                up.cancel()
    except* OSError as gone:
        raise ConnectionResetError("one side closed the connection") from gone


async def _pump(
    source: socket.socket, sink: socket.socket, moved: Callable[[], None], limit: int | None = None
) -> None:
    """Copy `limit` bytes, or all up to end of file; then close `sink` for writing."""
    loop = asyncio.get_running_loop()
    while limit is None or limit > 0:
        data = await loop.sock_recv(source, _CHUNK if limit is None else min(_CHUNK, limit))
        if not data:
            sink.shutdown(socket.SHUT_WR)
            return
        await loop.sock_sendall(sink, data)
        moved()
        limit = limit if limit is None else limit - len(data)


async def _connect(address: Address, port: int) -> socket.socket:
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _is_local(address: Address) -> bool:
    """Return whether the address is this machine's: the kernel then chooses it as source address as well.

    Sends nothing.
    """
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((str(address), 9))
        except OSError:
            return False  # no route
        return bool(ipaddress.ip_address(sock.getsockname()[0]) == address)


def _look_up(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]
