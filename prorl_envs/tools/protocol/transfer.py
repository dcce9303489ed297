"""Messages of a file transfer: one request, an archive in chunks, one end message.

Each transfer has its own tool server and socket, because it may take minutes and the socket's flow control
slows down the faster side. Each side is a blocking process or thread.
"""

import socket
from collections import deque

import msgspec

from prorl_envs.errors import TransferRefused
from prorl_envs.tools.protocol.messages import Framer, WireError, decode, encode
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits

#: Bytes of an archive in one frame, and maximum bytes of any frame.
CHUNK_SIZE = 256 * 1024
FRAME_LIMIT = 2 * 1024 * 1024
_RECEIVE_SIZE = 256 * 1024


class Pack(msgspec.Struct, array_like=True, tag=0):
    """Send `path` as an archive."""

    path: str
    limits: TreeLimits
    skip_unsupported: bool


class Unpack(msgspec.Struct, array_like=True, tag=1):
    """Create `path` from the archive that follows."""

    path: str
    limits: TreeLimits


class Chunk(msgspec.Struct, array_like=True, tag=2):
    """Next bytes of the archive."""

    data: bytes


class Failed(msgspec.Struct, array_like=True, tag=4):
    """Failure of the peer: an OSError, or with `errno` 0 a `TransferRefused`."""

    errno: int
    message: str


#: `Transferred` reports success: the packer's describes the archive, the unpacker's the created files.
type Message = Pack | Unpack | Chunk | Transferred | Failed

_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Pack | Unpack | Chunk | Transferred | Failed
)


class TransferChannel:
    """One side of a transfer; blocking. Its `read` and `write` transfer an archive as a stream.

    Args:
        sock: the socket; its owner closes it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._framer = Framer(FRAME_LIMIT)
        self._arrived: deque[bytes] = deque()
        self._rest = memoryview(b"")
        self._waiting = bytearray()
        self._end: Transferred | None = None

    def send(self, message: Message) -> None:
        """Send a message. Raise BrokenPipeError or ConnectionResetError if the peer has disconnected."""
        self._sock.sendall(encode(message))

    def send_end(self, done: Transferred) -> None:
        """Send the rest of an archive, then report success."""
        if self._waiting:
            self._send_chunk()
        self.send(done)

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            EOFError: the peer has disconnected.
            WireError: the peer broke the protocol.
        """
        while not self._arrived:
            data = self._sock.recv(_RECEIVE_SIZE)
            if not data:
                raise EOFError
            self._arrived += self._framer.feed(data)
        return decode(_messages, self._arrived.popleft(), "a message of a transfer")

    def write(self, data: bytes) -> int:
        """Send a part of an archive. Data is buffered until it fills a chunk."""
        self._waiting += data
        while len(self._waiting) >= CHUNK_SIZE:
            self._send_chunk()
        return len(data)

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes of the archive; empty at its end.

        Raises:
            EOFError, WireError: as `receive`.
            OSError, TransferRefused: the packer failed with this error.
        """
        while not self._rest and self._end is None:  # an empty chunk is allowed, and does not end the archive
            match self.receive():
                case Chunk(data):
                    self._rest = memoryview(data)
                case message:
                    self._end = ended(message)
        data, self._rest = bytes(self._rest[:size]), self._rest[size:]
        return data

    def check_end(self, done: Transferred) -> None:
        """Read to the packer's end message, and compare the totals.

        Raises:
            EOFError, WireError, OSError, TransferRefused: as `read`; also if the archive is incomplete.
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


def ended(message: Message) -> Transferred:
    """Return the peer's end message.

    Raises:
        OSError, TransferRefused: the peer failed with this error.
        WireError: the message is not an end message.
    """
    match message:
        case Transferred():
            return message
        case Failed(errno, text):
            raise OSError(errno, text) if errno else TransferRefused(text)
        case _:
            raise WireError(f"{type(message).__name__} at the end of a transfer")
