"""What the host and a tool server say to each other: length-prefixed msgpack frames over one stream socket.

Pure: bytes in, messages out. Both sides decode what they receive into typed structs, within a frame limit;
the host treats the server as hostile.
"""

import struct
from typing import Annotated

import msgspec

#: Bytes of the longest frame either side accepts.
FRAME_LIMIT = 48 * 1024 * 1024
#: Bytes of file content that fit into one frame with room for the rest of the message.
CONTENT_LIMIT = FRAME_LIMIT - 64 * 1024

#: Rich representations handed on per cell, MIME types of one, and characters of an exception's name. A kernel
#: that goes beyond breaks the protocol: a few megabytes of empty objects would become a gigabyte.
DISPLAY_LIMIT = 16
MIME_LIMIT = 64
ERROR_NAME_LIMIT = 200

_LENGTH = struct.Struct(">I")
#: Bytes of a frame before its message.
HEADER_SIZE = _LENGTH.size


class WireError(ValueError):
    """The other side broke the protocol."""


type ErrorName = Annotated[str, msgspec.Meta(max_length=ERROR_NAME_LIMIT)]
type Bundle = Annotated[dict[str, str], msgspec.Meta(max_length=MIME_LIMIT)]
type Bundles = Annotated[list[Bundle], msgspec.Meta(max_length=DISPLAY_LIMIT)]


class Request(msgspec.Struct, array_like=True, gc=False):
    """Base of what the host asks; every request is answered once, under its id."""

    id: int


class Setup(Request, tag=0):
    """First request on a connection.

    Args:
        workdir: where shells and sessions start.
        env: variables of every process, on top of the server's own environment.
        output_limit: bytes of output kept of each command.
        grace_s: seconds between an interrupt and the kill that follows if it had no effect.
        python: start a Python session now.
    """

    workdir: str
    env: dict[str, str]
    output_limit: int
    grace_s: float
    python: bool


class Bash(Request, tag=1):
    """A command for a shell; with `is_input`, what to type into the one that waits there. `restart` ends the
    session's shell first."""

    session: str
    command: str
    timeout_s: float
    is_input: bool = False
    restart: bool = False


class Python(Request, tag=2):
    code: str
    timeout_s: float


class Run(Request, tag=3):
    """Run a fresh process.

    Args:
        output_limit: bytes kept, of each of the two outputs where they are apart.
        apart: keep stderr apart from stdout.
        background: leave what it put into the background alive when it ends by itself.
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
    """One command of the editor, with the arguments the model gave."""

    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


class Cancel(Request, tag=7):
    """End the request with this id soon; it answers as usual, and this has no answer of its own."""


class EndProcesses(Request, tag=8):
    """Kill every process of the sandbox but its first and the tool servers."""


class Patch(Request, tag=20):
    """A patch of files, as the model wrote it; answered with `Edited`."""

    patch: str


class Return(Request, tag=21):
    """A lent shell goes back to the server: see `lent.py`. Answered with `BashDone` where a command runs, and
    else not at all.

    Args:
        status, cwd: what the shell last reported.
        running: the command under way, under whose id this is; None where there is none.
        nonce: under which its end will be reported.
        spent_s: seconds it has run.
        output, report: what was read of its output, and of a report that is not complete.
    """

    session: str
    status: int
    cwd: str
    running: Bash | None
    nonce: str
    spent_s: float
    output: bytes
    report: bytes


class Adopt(Request, tag=23):
    """A shell that another process began is the server's from now on, and lent. It is not answered.

    With it come the descriptors of a `sandbox.base.Begun`, in that order.

    Args:
        pid: its number, outside of the sandbox.
        settings: its terminal's, as it was begun.
    """

    session: str
    pid: int
    settings: bytes


class ReturnPython(Request, tag=22):
    """A lent Python session goes back to the server: see `lent.py`. Answered with `PythonDone` where a cell
    runs, and else not at all.

    Args:
        running: the cell under way, under whose id this is; None where there is none.
        spent_s: seconds it has run.
        output, heard: what was read of its output, and of what the session said.
    """

    running: Python | None
    spent_s: float
    output: bytes
    heard: bytes


class Reply(msgspec.Struct, array_like=True, gc=False):
    """Base of what the server answers."""

    id: int


class Done(Reply, tag=0):
    """A request without a result has been carried out."""


class BashDone(Reply, tag=1):
    """The end of a shell command; `exit_code` is None where it was interrupted or its shell was lost, where
    it is `waiting` for input and goes on, and where the request was `refused`, which `notice` explains. With
    `lent`, its terminal's settings, the shell is the host's from now on: see `lent.py`."""

    output: str
    omitted: int
    exit_code: int | None
    cwd: str
    timed_out: bool
    notice: str
    waiting: bool = False
    refused: bool = False
    lent: bytes = b""


class PythonDone(Reply, tag=2):
    """The end of a cell; `error` names the exception's class, or is empty. With `lent`, the session is the
    host's from now on: see `lent.py`."""

    output: str
    omitted: int
    error: ErrorName
    timed_out: bool
    notice: str
    display: Bundles
    lent: bool = False


class RunDone(Reply, tag=3):
    """The end of a fresh process; `errors` is its stderr where that was to be kept apart."""

    output: bytes
    omitted: int
    exit_code: int | None
    timed_out: bool
    duration_s: float
    errors: bytes = b""


class Content(Reply, tag=4):
    """A file's first bytes and its whole size."""

    data: bytes
    size: int


class Edited(Reply, tag=5):
    text: str
    ok: bool
    omitted: int


class Refused(Reply, tag=6):
    """The operating system said no: raised on the host as the same OSError."""

    errno: int
    message: str


class Cell(msgspec.Struct, array_like=True, gc=False):
    """What the server hands to the Python session's own process."""

    id: int
    code: str


class CellDone(msgspec.Struct, array_like=True, gc=False):
    """How the cell ended: see `PythonDone`. From a process that runs hostile code."""

    id: int
    error: ErrorName
    display: Bundles


type AnyRequest = (
    Setup
    | Bash
    | Python
    | Run
    | Write
    | Read
    | Edit
    | Cancel
    | EndProcesses
    | Patch
    | Return
    | ReturnPython
    | Adopt
)
type AnyReply = Done | BashDone | PythonDone | RunDone | Content | Edited | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest.__value__)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(
    Done | BashDone | PythonDone | RunDone | Content | Edited | Refused
)
_cells = msgspec.msgpack.Decoder(Cell)
_cells_done = msgspec.msgpack.Decoder(CellDone)


def encode(message: msgspec.Struct) -> bytearray:
    """One frame: four bytes of length, then the message.

    Raises:
        WireError: the message is longer than a frame may be, or holds text that is no Unicode.
    """
    frame = bytearray(64)
    try:
        _encoder.encode_into(message, frame, HEADER_SIZE)
    except UnicodeEncodeError as error:
        raise WireError(f"text that is no Unicode: {error}") from error
    if len(frame) - HEADER_SIZE > FRAME_LIMIT:
        raise WireError(f"message of {len(frame)} bytes; a frame holds {FRAME_LIMIT}")
    _LENGTH.pack_into(frame, 0, len(frame) - HEADER_SIZE)
    return frame


def decode[T](decoder: msgspec.msgpack.Decoder[T], frame: bytes, what: str) -> T:
    """The message in `frame`. Raises WireError where it is not `what`."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter for text that is no UTF-8
        raise WireError(f"not {what}: {error}") from error


def decode_request(frame: bytes) -> AnyRequest:
    """Raises WireError where the frame is not a request."""
    return decode(_requests, frame, "a request")


def decode_reply(frame: bytes) -> AnyReply:
    """Raises WireError where the frame is not a reply."""
    return decode(_replies, frame, "a reply")


def decode_cell(frame: bytes) -> Cell:
    """Raises WireError where the frame is not a cell."""
    return decode(_cells, frame, "a cell")


def decode_cell_done(frame: bytes) -> CellDone:
    """Raises WireError where the frame is not the end of a cell."""
    return decode(_cells_done, frame, "the end of a cell")


class Framer:
    """Cuts a byte stream into frames.

    Args:
        limit: bytes of the longest frame accepted.
    """

    def __init__(self, limit: int = FRAME_LIMIT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Take what arrived; return the frames it completes, in order.

        Raises:
            WireError: a frame announces more than the limit.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= HEADER_SIZE:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._limit:
                raise WireError(f"frame of {length} bytes announced; the limit is {self._limit}")
            end = start + HEADER_SIZE + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + HEADER_SIZE : end]))
            start = end
        del self._buffer[:start]
        return frames
