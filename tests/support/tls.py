"""TLS in front of a server without it, with certificates of a private authority."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import trustme


def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    """Return the TLS settings of a server on loopback with a certificate of this authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@asynccontextmanager
async def tls_front(url: str, authority: trustme.CA) -> AsyncIterator[str]:
    """Forward TLS connections to the server at `url`; yield the `https://` URL."""
    target = httpx.URL(url)
    forwarding: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(target.host, target.port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, inner[1]))
                both.create_task(_copy(inner[0], writer))
        finally:
            for each in (inner[1], writer):
                each.transport.abort()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(forward(reader, writer))
        forwarding.add(task)
        task.add_done_callback(forwarding.discard)

    listening = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=server_tls(authority))
    try:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in forwarding:
            task.cancel()
        if forwarding:
            await asyncio.wait(forwarding)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
