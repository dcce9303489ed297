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
from prorl_envs.rollout.client.token_files import addresses_of, drop_token, kept_token, new_token
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.logins import Logins
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.stop_signals import on_stop

log = logging.getLogger(__name__)

#: Seconds that open requests get to finish after the service has stopped; streams close by themselves then.
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
    """Start a service and answer HTTP in this event loop; on leaving, stop both and close every sandbox.

    Args:
        service: not started yet. Its node and model stay open.
        settings: address and access; None binds a free port on loopback. On loopback a token is generated if
            none is set (`token_files`).
        logins: sessions of browsers.
        drain_s: seconds that accepted jobs get to finish when leaving.
        bound: a socket of `bind`, closed on leaving; None binds the settings' address.

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
                stack.enter_context(kept_token(token, address))
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
    """Answer HTTP in this event loop while the block runs.

    Args:
        app: the ASGI application.
        host: address to bind; port: TCP port, 0 takes a free one.
        bound: a socket of `bind`, closed on leaving; None binds that address.
        limits: bounds of connections and their requests.
        counts: of connections, kept up to date.
        last_requests_s: seconds that open requests get to finish on leaving.
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
    """Return the settings' bounds on connections."""
    return ConnectionLimits(
        connections=settings.max_connections,
        head_s=settings.head_timeout_s,
        body_s=settings.body_timeout_s,
        keep_alive_s=settings.keep_alive_s,
    )


def needs_token(settings: ServerSettings) -> bool:
    """Return whether to generate a token: none is set, and other users of the machine could call."""
    return settings.generate_token and settings.token is None and settings.loopback


async def serve_until_signal(
    service: RolloutService,
    settings: ServerSettings,
    *,
    ready: Callable[[str], None] = lambda url: None,
    logins: Logins | None = None,
    bound: socket.socket | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then drain; a second SIGINT or SIGTERM stops at once.

    Args:
        service: not started yet.
        settings: address and access.
        ready: called with the base URL once the server answers.
        logins: sessions of browsers.
        bound: as of `serving`.

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
            log.info("stopping: up to %g s for accepted jobs", service.settings.drain_s)
            await _drain(service, second)


async def _drain(service: RolloutService, hurry: asyncio.Event) -> None:
    """Stop in order, or at once when `hurry` is set."""
    draining = asyncio.create_task(service.stop(drain_s=service.settings.drain_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()  # remaining jobs are then cancelled, and their sandboxes closed
    await asyncio.wait({draining, hurried})
    if not draining.cancelled():
        draining.result()


def bind(host: str, port: int) -> socket.socket:
    """Bind an address. Connections are refused until the socket is passed to `serving` or `answering`.

    Args:
        host: address; port: TCP port, 0 takes a free one.

    Raises:
        InputError: it cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio disables Nagle's algorithm only for a socket with a named protocol; otherwise answers take
        # 40 ms more.
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
    """Let requests made before the first `accept` wait instead of failing."""
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
