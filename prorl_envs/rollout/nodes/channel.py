"""Channels between head and node: frames over TCP, or two queues in one process.

A frame is its length in 4 bytes, big-endian, and its content. Messages sent in one iteration of the event
loop leave in one write. In the handshake, each side proves that it knows the shared token without sending it:
a challenge and its HMAC-SHA-256 (RFC 2104) each way. The following messages are not encrypted, like the
service's HTTP.
"""

import asyncio
import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.nodes.messages import Message, ToHead, ToNode, decode_to_head, decode_to_node, encode

#: Largest frame: far more than a result of a million tokens.
MAX_FRAME = 256 << 20
#: Timeout of the handshake, seconds.
HANDSHAKE_S = 10.0
_MAGIC = b"prorl-envs node 1\n"
_LENGTH = struct.Struct(">I")
_NONCE = 32


class ChannelClosed(ProrlError):
    """The connection is lost, or the other side sent an invalid message."""


class NodeChannel[Out: Message, In: Message](Protocol):
    """One side of a connection between head and node."""

    def send(self, message: Out) -> None:
        """Send a message. It is dropped if the other side is gone: `receive` then raises."""
        ...

    async def receive(self) -> In:
        """Return the next message.

        Raises:
            ChannelClosed: there will be no further message.
        """
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...


class TcpChannel[Out: Message, In: Message]:
    """A channel over a connection whose handshake is done.

    Args:
        reader, writer: of the connection; closed with the channel.
        decode: decodes frames.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode: Callable[[bytes], In]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decode = decode
        self._unsent: list[bytes] = []

    def send(self, message: Out) -> None:
        """See `NodeChannel.send`."""
        content = encode(message)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (_LENGTH.pack(len(content)), content)

    async def receive(self) -> In:
        """See `NodeChannel.receive`."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME:
                raise ChannelClosed(f"a frame of {length} bytes is longer than the {MAX_FRAME} that may be")
            return self._decode(await self._reader.readexactly(length))
        except msgspec.MsgspecError as error:
            raise ChannelClosed(f"not a message: {error}") from error
        except (OSError, EOFError) as error:
            raise ChannelClosed(f"the connection is lost: {error}") from error

    def close(self) -> None:
        """See `NodeChannel.close`."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._writer.is_closing():
            self._writer.write(b"".join(unsent))


class _Queued[Out: Message, In: Message]:
    """One side of a channel pair within one event loop. Messages are encoded to frames, as on a network."""

    def __init__(self, decode: Callable[[bytes], In]) -> None:
        self._decode = decode
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.other: _Queued[In, Out] | None = None

    def send(self, message: Out) -> None:
        if self.other is not None:
            self.other._inbox.put_nowait(encode(message))

    async def receive(self) -> In:
        frame = await self._inbox.get()
        if frame is None:
            self._inbox.put_nowait(None)
            raise ChannelClosed("the other side has hung up")
        return self._decode(frame)

    def close(self) -> None:
        if self.other is not None:
            self.other._inbox.put_nowait(None)
            self.other.other = None
            self.other = None
            self._inbox.put_nowait(None)


def channel_pair() -> tuple[NodeChannel[ToNode, ToHead], NodeChannel[ToHead, ToNode]]:
    """Return the head's side and the node's side of a channel in one event loop."""
    head: _Queued[ToNode, ToHead] = _Queued(decode_to_head)
    node: _Queued[ToHead, ToNode] = _Queued(decode_to_node)
    head.other, node.other = node, head
    return head, node


async def connect(host: str, port: int, token: str) -> NodeChannel[ToHead, ToNode]:
    """Connect a node to the head.

    Raises:
        ChannelClosed: there is no head at the address, or the handshake fails.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _shake(reader, writer, token.encode(), mine=b"node", theirs=b"head")
            except BaseException:
                writer.close()
                raise
    except TimeoutError:
        raise ChannelClosed(f"{host}:{port} does not answer") from None
    except (OSError, EOFError) as error:
        hint = "is the service up, is this its nodes.port, and is nodes.token the same on both sides?"
        raise ChannelClosed(f"{host}:{port} cannot be joined: {error}", hint=hint) from error
    return TcpChannel(reader, writer, decode_to_node)


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str
) -> NodeChannel[ToNode, ToHead]:
    """Return the head's channel to a node that has connected.

    Raises:
        ChannelClosed: the handshake fails: it is no node, or has another token.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await _shake(reader, writer, token.encode(), mine=b"head", theirs=b"node")
    except (TimeoutError, OSError, EOFError, ChannelClosed) as error:
        writer.close()
        raise ChannelClosed(f"a connection that is no node's: {error}") from error
    return TcpChannel(reader, writer, decode_to_head)


async def _shake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, *, mine: bytes, theirs: bytes
) -> None:
    """Prove that this side knows the token, and check the proof of the other side. Both nonces are in both
    proofs, and each proof names its side, so no proof can be reflected or replayed."""
    nonce = os.urandom(_NONCE)
    writer.write(_MAGIC + nonce)
    if await reader.readexactly(len(_MAGIC)) != _MAGIC:
        raise ChannelClosed("it does not speak our protocol")
    other = await reader.readexactly(_NONCE)
    writer.write(_proof(token, mine, nonce, other))
    answer = await reader.readexactly(hashlib.sha256().digest_size)
    if not hmac.compare_digest(answer, _proof(token, theirs, other, nonce)):
        raise ChannelClosed("it has another token", hint="nodes.token has to be the same on both sides")


def _proof(token: bytes, side: bytes, nonce: bytes, other: bytes) -> bytes:
    return hmac.digest(token, _MAGIC + side + nonce + other, "sha256")
