"""What the two ends of a transfer say to each other: one request, an archive in pieces, one end.

A transfer has a tool server and a socket of its own: it may take minutes, and the socket's own flow control
holds back whoever is faster. Each end is a blocking process or thread.
"""

import socket
from collections import deque
from typing import Annotated

import msgspec

from prorl_envs.errors import TransferRefused
from prorl_envs.tools.tree import NAMED_LIMIT, PATH_LIMIT, Transferred, TreeLimits
from prorl_envs.tools.wire import Framer, WireError, encode

#: Bytes of archive in one frame; and of any frame.
CHUNK_SIZE = 256 * 1024
FRAME_LIMIT = 2 * 1024 * 1024
_RECEIVE_SIZE = 256 * 1024

type Named = Annotated[
    list[Annotated[str, msgspec.Meta(max_length=2 * PATH_LIMIT)]], msgspec.Meta(max_length=NAMED_LIMIT)
]


class Pack(msgspec.Struct, array_like=True, tag=0):
    """Send `path` as an archive."""

    path: str
    limits: TreeLimits
    leave_out: bool


class Unpack(msgspec.Struct, array_like=True, tag=1):
    """Make `path` from the archive that follows."""

    path: str
    limits: TreeLimits


class Chunk(msgspec.Struct, array_like=True, tag=2):
    """The next bytes of the archive."""

    data: bytes


class End(msgspec.Struct, array_like=True, tag=3):
    """All went well. The packer's says what the archive holds, the unpacker's what it made."""

    entries: int
    bytes: int
    left_out: Named
    left_out_count: int


class Failed(msgspec.Struct, array_like=True, tag=4):
    """The other end cannot go on; `errno` is 0 where it refuses what it was given or found."""

    errno: int
    message: str


type Message = Pack | Unpack | Chunk | End | Failed

_messages = msgspec.msgpack.Decoder(Pack | Unpack | Chunk | End | Failed)


class Channel:
    """One end, blocking. Has `read` and `write`, so that an archive can be streamed over it.

    Args:
        sock: stays its owner's.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._framer = Framer(FRAME_LIMIT)
        self._arrived: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._waiting = bytearray()
        self._end: End | None = None

    def send(self, message: Message) -> None:
        """Raises BrokenPipeError or ConnectionResetError where the other end has gone."""
        self._sock.sendall(encode(message))

    def send_end(self, done: Transferred) -> None:
        """Say that all went well, after what is left of an archive."""
        if self._waiting:
            self._send_chunk()
        self.send(End(done.entries, done.bytes, done.left_out, done.left_out_count))

    def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError: the other end has gone.
            WireError: it broke the protocol.
        """
        while not self._arrived:
            data = self._sock.recv(_RECEIVE_SIZE)
            if not data:
                raise EOFError
            self._arrived += self._framer.feed(data)
        try:
            message: Message = _messages.decode(self._arrived.popleft())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"not a message of a transfer: {error}") from error
        return message

    def write(self, data: bytes) -> int:
        """Send a part of an archive, together with what follows."""
        self._waiting += data
        while len(self._waiting) >= CHUNK_SIZE:
            self._send_chunk()
        return len(data)

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the archive; empty at its end.

        Raises:
            EOFError, WireError: as `receive`.
            OSError, TransferRefused: the packer failed so.
        """
        while not self._rest and self._end is None:  # a piece may be empty, and does not end an archive
            match self.receive():
                case Chunk(data):
                    self._rest = memoryview(data)
                case message:
                    self._end = ended(message)
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data

    def check_end(self, done: Transferred) -> None:
        """Read on to the packer's end, and compare.

        Raises:
            EOFError, WireError, OSError, TransferRefused: as `read`; also where not all has arrived.
        """
        while self.read(CHUNK_SIZE):
            pass
        assert self._end is not None
        if (self._end.entries, self._end.bytes) != (done.entries, done.bytes):
            raise TransferRefused("the archive is not complete")
        done.left_out, done.left_out_count = self._end.left_out, self._end.left_out_count

    def _send_chunk(self) -> None:
        self.send(Chunk(bytes(self._waiting[:CHUNK_SIZE])))
        del self._waiting[:CHUNK_SIZE]


def ended(message: Message) -> End:
    """What the other end says at its end.

    Raises:
        OSError, TransferRefused: it failed so.
        WireError: it says something else.
    """
    match message:
        case End():
            return message
        case Failed(errno, text):
            raise OSError(errno, text) if errno else TransferRefused(text)
        case _:
            raise WireError(f"{type(message).__name__} at the end of a transfer")
