"""HTTP server of a rollout service, with an orderly shutdown."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from pydantic import SecretStr
from starlette.types import ASGIApp

from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError
from prorl_envs.listener.connection import ConnectionCounts, ConnectionLimits
from prorl_envs.listener.listener import DEFAULT_LIMITS, HttpListener
from prorl_envs.rollout.client.token_files import addresses_of, drop_token, new_token, stored_token
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.auth import Logins
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.stop_signals import on_stop

log = logging.getLogger(__name__)

#: Seconds for open requests to finish after the service has stopped. Requests that wait are answered then.
LAST_REQUESTS_S = 5


@asynccontextmanager
async def serving(
    service: RolloutService,
    settings: ServerSettings | None = None,
    *,
    drain_s: float = 0.0,
    logins: Logins | None = None,
    bound: socket.socket | None = None,
) -> AsyncIterator[str]:
    """Start a service and its HTTP server in this event loop. On leaving, stop both and close every sandbox.

    Args:
        service: a service that is not started yet. Its node and model stay open.
        settings: address and tokens; None binds a free port on loopback. On loopback a token is generated if
            none is set (`token_files`).
        logins: browser sessions.
        drain_s: seconds for accepted jobs to finish on leaving.
        bound: a socket returned by `bind`, which is closed on leaving; None binds the settings' address.

    Yields:
        The base URL.

    Raises:
        InputError: the address cannot be bound, or needs a token.
    """
    settings = settings or ServerSettings(port=0)
    token = new_token() if needs_token(settings) else ""
    locked = settings.model_copy(update={"token": SecretStr(token)}) if token else settings
    app, limits = create_app(service, locked, logins), connection_limits(settings)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(
            answering(
                app, settings.host, settings.port, bound=bound, limits=limits, counts=service.connections
            )
        )
        for address in addresses_of(url):
            if token:
                stack.enter_context(stored_token(token, address))
            else:
                drop_token(address)  # token of an earlier service at this address
        await service.start()
        try:
            yield url
        finally:
            await service.stop(drain_s=drain_s)


@asynccontextmanager
async def answering(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    bound: socket.socket | None = None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    counts: ConnectionCounts | None = None,
    last_requests_s: float = LAST_REQUESTS_S,
    log_level: str | None = None,
) -> AsyncIterator[str]:
    """Run an HTTP server in this event loop while the block runs.

    Args:
        app: the ASGI application.
        host: address to bind; `port`: TCP port, 0 takes a free port.
        bound: a socket returned by `bind`, which is closed on leaving; None binds `host` and `port`.
        limits: limits of connections and their requests.
        counts: connection counts, which the server updates.
        last_requests_s: seconds for open requests to finish on leaving.
        log_level: lowest level of the server's own log, such as "critical"; None leaves it unchanged.

    Yields:
        The base URL.

    Raises:
        InputError: the address cannot be bound.
    """
    bound = bound or bind(host, port)
    _listen(bound)
    url = _url(bound)
    listener = HttpListener(app, bound, limits, counts=counts, log_level=log_level)
    try:
        yield url
    finally:
        try:
            await listener.drain(last_requests_s)
        finally:
            await listener.aclose()


def connection_limits(settings: ServerSettings) -> ConnectionLimits:
    """Return the limits of connections in the settings."""
    return ConnectionLimits(
        connections=settings.max_connections,
        head_s=settings.head_timeout_s,
        body_s=settings.body_timeout_s,
        keep_alive_s=settings.keep_alive_s,
    )


def needs_token(settings: ServerSettings) -> bool:
    """Return True if a token must be generated: none is set, and the service is bound to loopback, where all
    users of the machine have access."""
    return settings.generate_token and settings.token is None and settings.loopback


async def serve_until_signal(
    service: RolloutService,
    settings: ServerSettings,
    *,
    ready: Callable[[str], None] = lambda url: None,
    logins: Logins | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then drain. A second SIGINT or SIGTERM stops the drain.

    Args:
        service: a service that is not started yet.
        settings: address and tokens.
        ready: called with the base URL once the server answers.
        logins: browser sessions.
        bound: see `serving`.

    Raises:
        InputError: the address cannot be bound, or needs a token.
    """
    first, second = asyncio.Event(), asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if first.is_set() and number is not signal.SIGHUP:  # a closed terminal causes several
            second.set()
        first.set()

    with on_stop(stop):
        async with serving(service, settings, logins=logins, bound=bound) as url:
            ready(url)
            await first.wait()
            log.info("stopping: accepted jobs have %g s to finish", service.settings.drain_s)
            await _drain(service, second)


async def _drain(service: RolloutService, stop_now: asyncio.Event) -> None:
    """Stop the service after a drain. If `stop_now` is set, end the drain."""
    stopping = asyncio.create_task(service.stop(drain_s=service.settings.drain_s))
    waiting = asyncio.create_task(stop_now.wait())
    await asyncio.wait({stopping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not stopping.done():
        stopping.cancel()  # `stop` then cancels the remaining jobs and closes their sandboxes
    await asyncio.wait({stopping, waiting})
    if not stopping.cancelled():
        stopping.result()


def bind(host: str, port: int) -> socket.socket:
    """Bind an address. Connections are refused until the socket is passed to `serving` or `answering`.

    Args:
        host: address to bind; `port`: TCP port, 0 takes a free port.

    Raises:
        InputError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio disables Nagle's algorithm only for a socket with an explicit protocol. Without this,
        # responses take 40 ms more.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return listener


def _listen(bound: socket.socket) -> None:
    """Start to listen, so that requests before the first `accept` wait instead of failing."""
    try:
        bound.listen(2048)
    except OSError as error:  # another process listens on the same address
        host, port = bound.getsockname()[:2]
        bound.close()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another port, or 0 for a free one"
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
