"""TCP listener where nodes join with the shared token."""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.errors import InputError
from prorl_envs.rollout.nodes.channel import ChannelClosed, accept
from prorl_envs.rollout.nodes.fleet import Fleet

log = logging.getLogger(__name__)

#: Maximum number of connections in the handshake; further ones are closed.
_STRANGERS = 256


@asynccontextmanager
async def joining(fleet: Fleet, *, host: str, port: int, token: str) -> AsyncIterator[None]:
    """Let nodes join a fleet at its `port` while the block runs; on leaving, shut down every node.

    Args:
        host: address to bind; port: TCP port, 0 takes a free one.
        token: shared secret of head and nodes.

    Raises:
        InputError: the address cannot be bound.
    """
    strangers: set[asyncio.Task[None]] = set()

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(strangers) >= _STRANGERS:
            writer.close()
            return
        strangers.add(task)
        try:
            channel = await accept(reader, writer, token)
        except ChannelClosed as error:
            log.warning("%s: %s", writer.get_extra_info("peername"), error)
            return
        finally:
            strangers.discard(task)
        with contextlib.suppress(asyncio.CancelledError):  # by the fleet, when it closes
            await fleet.serve(channel)

    try:
        server = await asyncio.start_server(let_in, host, port)
    except OSError as error:
        raise InputError(
            f"nodes cannot join on {host}:{port}: {error.strerror}", hint="nodes.port: 0 takes a free one"
        ) from error
    beating = asyncio.create_task(fleet.beat())
    fleet.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        beating.cancel()
        for task in list(strangers):
            task.cancel()
        await fleet.aclose()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
