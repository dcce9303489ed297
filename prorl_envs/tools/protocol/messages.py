"""Messages between the host and a tool server: length-prefixed msgpack frames over one stream socket.

Pure: bytes in, messages out. Both sides decode received frames into typed structs, within a frame limit; the
host treats the server as untrusted.
"""

import struct
from typing import Annotated

import msgspec

#: Maximum bytes of a frame that either side accepts.
FRAME_LIMIT = 48 * 1024 * 1024
#: Maximum bytes of file content in one frame, with room for the rest of the message.
CONTENT_LIMIT = FRAME_LIMIT - 64 * 1024

#: Maximum rich representations per cell, MIME types of one representation, and characters of an exception's
#: name. More breaks the protocol: a few megabytes of empty objects would decode to a gigabyte.
DISPLAY_LIMIT = 16
MIME_LIMIT = 64
ERROR_NAME_LIMIT = 200

#: Descriptor of the memory that a Python session is to get: see `CheckpointingSandbox.restore_memory`.
MEMORY_FD = 200

_LENGTH = struct.Struct(">I")
_HEADER_SIZE = _LENGTH.size


class WireError(ValueError):
    """The peer broke the protocol."""


type ErrorName = Annotated[str, msgspec.Meta(max_length=ERROR_NAME_LIMIT)]
type Bundle = Annotated[dict[str, str], msgspec.Meta(max_length=MIME_LIMIT)]
type Bundles = Annotated[list[Bundle], msgspec.Meta(max_length=DISPLAY_LIMIT)]


class Request(msgspec.Struct, array_like=True, gc=False):
    """Base of the host's requests; every request gets one reply with the same id."""

    id: int


class Setup(Request, tag=0):
    """First request on a connection.

    Args:
        workdir: directory in which shells and sessions start.
        env: variables of every process, on top of the server's own environment.
        output_limit: bytes of output kept of each command.
        grace_s: seconds between an interrupt and the kill that follows if the interrupt had no effect.
        python: start a Python session now.
    """

    workdir: str
    env: dict[str, str]
    output_limit: int
    grace_s: float
    python: bool


class Bash(Request, tag=1):
    """Command for a shell; with `is_input`, text to type into the waiting command.

    With `restart`, the session's shell is killed first.
    """

    session: str
    command: str
    timeout_s: float
    is_input: bool = False
    restart: bool = False


class Python(Request, tag=2):
    """Cell; the server forwards the request to the Python session's own process."""

    code: str
    timeout_s: float


class Run(Request, tag=3):
    """Run a fresh process.

    Args:
        output_limit: bytes kept of the output, or of each stream if stderr is kept apart.
        apart: keep stderr apart from stdout.
        background: let background processes continue after the process exits by itself.
    """

    argv: list[str]
    cwd: str
    env: dict[str, str]
    stdin: bytes
    timeout_s: float
    output_limit: int
    apart: bool = False
    background: bool = False


class Write(Request, tag=4):
    path: str
    data: bytes
    mode: int


class Read(Request, tag=5):
    path: str
    limit: int


class Edit(Request, tag=6):
    """Command of the editor, with the model's arguments."""

    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


class Cancel(Request, tag=7):
    """Stop the request with this id. That request is answered as usual; `Cancel` has no reply of its own."""


class EndProcesses(Request, tag=8):
    """Kill every process of the sandbox except its first process and the tool servers."""


class Patch(Request, tag=20):
    """Patch of files, as the model wrote it; answered with `Edited`."""

    patch: str


class ListSessions(Request, tag=21):
    """Report the processes of the sessions."""


class SaveShell(Request, tag=22):
    """Report the state of a shell; answered with `SavedShell`."""

    session: str


class RestoreShell(Request, tag=23):
    """Start the shell of a session with a saved state and last exit status."""

    session: str
    state: bytes
    status: int


class Reply(msgspec.Struct, array_like=True, gc=False):
    """Base of the server's replies."""

    id: int


class Done(Reply, tag=0):
    """Success of a request without a result."""


class BashDone(Reply, tag=1):
    """Result of a shell command.

    `exit_code` is None if the command was interrupted, its shell was lost, it is `waiting` for input, or the
    request was `refused` (see `notice`).
    """

    output: str
    omitted: int
    exit_code: int | None
    cwd: str
    timed_out: bool
    notice: str
    waiting: bool = False
    refused: bool = False


class PythonDone(Reply, tag=2):
    """Result of a cell; `error` is the exception's class name, or empty."""

    output: str
    omitted: int
    error: ErrorName
    timed_out: bool
    notice: str
    display: Bundles


class RunDone(Reply, tag=3):
    """Result of a fresh process; `errors` is its stderr if it was kept apart."""

    output: bytes
    omitted: int
    exit_code: int | None
    timed_out: bool
    duration_s: float
    errors: bytes = b""


class Content(Reply, tag=4):
    """First bytes of a file."""

    data: bytes


class Edited(Reply, tag=5):
    text: str
    ok: bool
    omitted: int


class SessionPids(Reply, tag=7):
    """Pids, as the server sees them: of the shells by the names of their sessions, of the Python session."""

    shells: dict[str, int]
    python: int | None


class SavedShell(Reply, tag=8):
    """State of a shell and its last exit status, which is None if a program has its terminal."""

    state: bytes
    status: int | None


class ToolRefused(Reply, tag=6):
    """Error of the operating system, raised on the host as the same OSError."""

    errno: int
    message: str


class CellDone(msgspec.Struct, array_like=True, gc=False):
    """Result of a cell: see `PythonDone`. Sent by a process that runs untrusted code."""

    id: int
    error: ErrorName
    display: Bundles


type AnyRequest = (
    Setup | Bash | Python | Run | Write | Read | Edit | Cancel | EndProcesses | Patch
    | ListSessions | SaveShell | RestoreShell
)  # fmt: skip
type AnyReply = (
    Done | BashDone | PythonDone | RunDone | Content | Edited | ToolRefused | SessionPids | SavedShell
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest.__value__)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply.__value__)
_cells = msgspec.msgpack.Decoder(Python)
_cells_done = msgspec.msgpack.Decoder(CellDone)


def encode(message: msgspec.Struct) -> bytearray:
    """Return one frame: four bytes of length, then the message.

    Raises:
        WireError: the message is longer than a frame may be, or holds text that is not Unicode.
    """
    frame = bytearray(64)
    try:
        _encoder.encode_into(message, frame, _HEADER_SIZE)
    except UnicodeEncodeError as error:
        raise WireError(f"text that is not Unicode: {error}") from error
    if len(frame) - _HEADER_SIZE > FRAME_LIMIT:
        raise WireError(f"message of {len(frame)} bytes; the limit is {FRAME_LIMIT}")
    _LENGTH.pack_into(frame, 0, len(frame) - _HEADER_SIZE)
    return frame


def decode[T](decoder: msgspec.msgpack.Decoder[T], frame: bytes, expected: str) -> T:
    """Return the message in `frame`. Raise WireError if it is not `expected`."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter for text that is not UTF-8
        raise WireError(f"not {expected}: {error}") from error


def decode_request(frame: bytes) -> AnyRequest:
    """Decode a request. Raise WireError if the frame is not a request."""
    return decode(_requests, frame, "a request")


def decode_reply(frame: bytes) -> AnyReply:
    """Decode a reply. Raise WireError if the frame is not a reply."""
    return decode(_replies, frame, "a reply")


def decode_cell(frame: bytes) -> Python:
    """Decode a cell. Raise WireError if the frame is not a cell."""
    return decode(_cells, frame, "a cell")


def decode_cell_done(frame: bytes) -> CellDone:
    """Decode a cell's result. Raise WireError if the frame is not such a result."""
    return decode(_cells_done, frame, "the end of a cell")


class Framer:
    """Splitter of a byte stream into frames.

    Args:
        limit: maximum bytes of a frame.
    """

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Add received bytes; return the frames they complete, in order.

        Raises:
            WireError: a frame announces more than the limit.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _HEADER_SIZE:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._limit:
                raise WireError(f"frame of {length} bytes announced; the limit is {self._limit}")
            end = start + _HEADER_SIZE + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _HEADER_SIZE : end]))
            start = end
        del self._buffer[:start]
        return frames
