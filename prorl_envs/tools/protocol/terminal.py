"""Messages between the host and the process of an interactive session, in the frames of `messages`.

Pure. The host sends one `Open`, then other messages in any order. The session sends output as it arrives, and
`Exited` as the last message.
"""

from typing import Literal

import msgspec

from prorl_envs.tools.protocol.messages import FRAME_LIMIT, decode

#: Bytes of output in one frame.
OUTPUT_SIZE = 32 * 1024
#: Maximum bytes of a frame that the session sends, with room for the rest of the message.
SESSION_FRAME_LIMIT = OUTPUT_SIZE + 64

type Signal = Literal["SIGINT", "SIGTERM", "SIGKILL", "SIGQUIT", "SIGHUP"]


class Open(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Start the program.

    Args:
        argv: program and arguments.
        cwd: absolute directory.
        env: variables on top of the sandbox's own.
        terminal: run on a pseudo-terminal; otherwise with pipes, and stderr kept apart.
        rows, columns: the terminal's size.
    """

    argv: list[str]
    cwd: str
    env: dict[str, str]
    terminal: bool
    rows: int
    columns: int


class Input(msgspec.Struct, array_like=True, tag=1, gc=False):
    data: bytes


class Resize(msgspec.Struct, array_like=True, tag=2, gc=False):
    rows: int
    columns: int


class SendSignal(msgspec.Struct, array_like=True, tag=3, gc=False):
    """Send a signal to the program's process group; on a terminal, also to the foreground group."""

    name: Signal


class Output(msgspec.Struct, array_like=True, tag=0, gc=False):
    """Output of the program; `errors` is True for stderr, if it is kept apart."""

    data: bytes
    errors: bool


class Exited(msgspec.Struct, array_like=True, tag=1, gc=False):
    """Exit of the program: its status, negative for a signal; or the reason why it could not be started."""

    status: int
    failure: str


type ToSession = Open | Input | Resize | SendSignal
type FromSession = Output | Exited

_to_session: msgspec.msgpack.Decoder[ToSession] = msgspec.msgpack.Decoder(Open | Input | Resize | SendSignal)
_from_session: msgspec.msgpack.Decoder[FromSession] = msgspec.msgpack.Decoder(Output | Exited)


def decode_to_session(frame: bytes) -> ToSession:
    """Decode a message to a session. Raise WireError if the frame is not such a message."""
    return decode(_to_session, frame, "for a session")


def decode_from_session(frame: bytes) -> FromSession:
    """Decode a message from a session. Raise WireError if the frame is not such a message."""
    return decode(_from_session, frame, "from a session")


def input_frames(data: bytes) -> list[Input]:
    """Split input into pieces that fit into frames."""
    size = FRAME_LIMIT // 2
    return [Input(data[start : start + size]) for start in range(0, len(data), size)]
