"""Runs a rollout service behind HTTP, and ends it in order."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api import create_app
from prorl_envs.rollout.service import RolloutService

log = logging.getLogger(__name__)

#: Idle connections stay open this long. The usual 5 s closes them under clients that are about to use them.
KEEP_ALIVE_S = 120
#: Seconds open requests get to end after the service has ended; streams end by themselves then.
LAST_REQUESTS_S = 5


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever runs the event loop."""
        yield


@asynccontextmanager
async def serving(
    service: RolloutService, settings: ServerSettings | None = None, *, drain_s: float = 0.0
) -> AsyncIterator[str]:
    """Start a service and answer HTTP in this event loop; on leaving, stop both and close every sandbox.

    Args:
        service: not started yet. Its node and model stay open.
        settings: where to bind and what to demand; None binds a free port on loopback.
        drain_s: seconds that accepted jobs get to finish when leaving.

    Yields:
        The base URL.

    Raises:
        InputError: the address cannot be bound, or needs a token.
    """
    settings = settings or ServerSettings(port=0)
    async with answering(create_app(service, settings), settings.host, settings.port) as url:
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
    last_requests_s: int = LAST_REQUESTS_S,
    log_level: str | None = None,
) -> AsyncIterator[str]:
    """Answer HTTP in this event loop while the block runs.

    Args:
        app: what answers.
        host: address to bind; port: TCP port, 0 takes a free one.
        last_requests_s: seconds that open requests get to end on leaving.
        log_level: least level the server's own log says, such as "critical"; None leaves it as it is.

    Yields:
        The base URL.

    Raises:
        InputError: the address cannot be bound.
    """
    with contextlib.closing(_bind(host, port)) as listener:
        config = uvicorn.Config(
            app,
            http="h11",  # bounds a request's headers; httptools in uvicorn does not
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=log_level,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=last_requests_s,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield _url(listener)
        finally:
            server.should_exit = True
            await task


async def serve_until_signal(
    service: RolloutService, settings: ServerSettings, *, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends at once.

    Args:
        service: not started yet.
        settings: where to bind and what to demand.
        ready: called with the base URL once it answers.

    Raises:
        InputError: the address cannot be bound, or needs a token.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        async with serving(service, settings) as url:
            ready(url)
            await first.wait()
            log.info("stopping: up to %g s for accepted jobs", service.settings.drain_s)
            await _drain(service, second)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _drain(service: RolloutService, hurry: asyncio.Event) -> None:
    """Stop in order, or at once when `hurry` is set."""
    draining = asyncio.create_task(service.stop(drain_s=service.settings.drain_s))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()  # what is left is then cancelled, and its sandboxes are closed
    await asyncio.wait({draining, hurried})
    if not draining.cancelled():
        draining.result()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that requests made before the first `accept` wait instead of failing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named; else answers take 40 ms more.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="choose another port, or 0 for a free one",
        ) from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}"
