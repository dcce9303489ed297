"""What a service (the head) and a node tell each other.

A node carries out whole attempts: INIT, RUN with its model calls, EVAL and close all happen there, next to
the sandbox. The head says which and when, and which model server a turn goes to; tokens, prompts and tool
output stay on the node until the result is asked for. An `order` numbers an attempt on a node, a `turn` a
model call in RUN.

Frames are MessagePack arrays that begin with the message's tag (msgspec's `array_like`), so a field may be
added at the end only. Head and node have the same version of this package (`Ready`), so nothing else has to
be compatible.
"""

from typing import Literal

import msgspec

from prorl_envs.rollout.types import Stage


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all."""


# From the head.


class Welcome(_Message, tag=1):
    """The first message: what to prepare for.

    Args:
        version: of the head's package.
        tokenizer: folder or Hub name of the model's tokenizer; `model`: its name, or ""; `protocol`: what its
            servers speak whose URL does not say.
        tool_format: how the model writes tool calls; `reasoning`: what becomes of earlier reasoning.
        beat_s: seconds between two beats; `silent_s`: without a word for so long, the other side is gone.
        grace_s, close_s: as in the service's settings.
    """

    version: str
    tokenizer: str
    model: str
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"]
    tool_format: str
    reasoning: Literal["keep", "user_turn", "template"]
    beat_s: float
    silent_s: float
    grace_s: float
    close_s: float


class Refused(_Message, tag=2):
    """The node cannot take part."""

    reason: str
    hint: str


class Perform(_Message, tag=3):
    """Carry out a stage, and say `Performed`.

    Args:
        request: with INIT, the group as JSON; else empty. `sample`: the job's index in it.
        attempt: of the job, from 1.
        trace: context of the stage's span, as W3C trace headers.
    """

    order: int
    stage: Stage
    attempt: int
    sample: int
    request: bytes
    trace: dict[str, str]


class Interrupt(_Message, tag=4):
    """End the stage that runs. `Performed` still comes, when nothing runs any more."""

    order: int


class Collect(_Message, tag=5):
    """Say what the attempt has come to by now: `Collected`."""

    order: int


class Close(_Message, tag=6):
    """Close the attempt's environment, say `Closed`, and forget it."""

    order: int


class SampleAt(_Message, tag=7):
    """Sample the turn on this server.

    Args:
        url: base URL, as trajectories name it; `address`: the same with its protocol, where one was named.
        version: of its weights, as far as the head knows.
    """

    turn: int
    url: str
    address: str
    version: str


class HangUp(_Message, tag=8):
    """End the call that samples this turn; what it sampled does not count."""

    turn: int


class TurnFailed(_Message, tag=9):
    """No server can sample this turn."""

    turn: int
    message: str
    hint: str


class Hold(_Message, tag=10):
    """Weights begin or cease to change.

    Args:
        closed: no turn begins. Deadlines stand still for turns that are held.
        resample: turns that are broken off now begin anew.
    """

    closed: bool
    resample: bool


class End(_Message, tag=11):
    """Close everything and go."""


# From the node.


class Ready(_Message, tag=20):
    """The node can take part.

    Args:
        name: of the node.
        init, run, eval, live: how much may happen there at once.
        environments: their names.
        fingerprint: of the tokenizer and its chat template.
    """

    name: str
    version: str
    init: int
    run: int
    eval: int
    live: int
    environments: list[str]
    fingerprint: str


class Row(_Message):
    """A row of tokens: see `Trajectory`.

    Args:
        ids, mask, logprobs: arrays in this machine's byte order: 4, 1 and 8 bytes a token.
        turns: as JSON.
    """

    ids: bytes
    mask: bytes
    logprobs: bytes
    turns: bytes
    drift: int
    exact: bool
    parent: int | None = None
    shared: int = 0


class Report(_Message):
    """What an attempt has come to.

    Args:
        prompted, stop_reason, model_s, tools_s, held_s: as in `Account`.
        text: as JSON, what is read of it: `messages`, `tools`, and of the grade `reward`, `components` and
            `evidence`; empty where only the rest is told.
        rows: its tokens: the forks, and the trajectory last.
        aborted: see `Result`.
    """

    prompted: bool
    stop_reason: str | None
    model_s: float
    tools_s: float
    held_s: float
    text: bytes = b""
    rows: list[Row] = []
    aborted: list[Row] = []


class Performed(_Message, tag=21):
    """A stage has ended, and nothing of it runs any more.

    Args:
        seconds: of active time.
        failure: as JSON, or empty.
        report: whole after EVAL, else without text and tokens.
    """

    order: int
    seconds: float
    failure: bytes
    report: Report


class Collected(_Message, tag=22):
    order: int
    report: Report


class Closed(_Message, tag=23):
    """An environment is closed; `ok`: in order."""

    order: int
    ok: bool


class AskTurn(_Message, tag=24):
    """Where should this turn be sampled? Answered by `SampleAt`, or `TurnFailed`.

    Args:
        session: the job, as model servers know it.
        tokens: of the prompt.
    """

    turn: int
    session: str
    tokens: int


class TurnSampled(_Message, tag=25):
    """A call that `SampleAt` asked for has ended. What it sampled stays here.

    Args:
        error: "" where it was sampled; `overloaded` or `unavailable`: another server may do, and the head
        says
            which; `model`: it has failed.
        complaints: how often the server said that it has too much to do.
        finish_reason, version, cached: of the answer.
    """

    turn: int
    error: str
    complaints: int
    message: str = ""
    hint: str = ""
    finish_reason: str = ""
    version: str = ""
    cached: int | None = None


class TurnLeft(_Message, tag=26):
    """Nobody waits for this turn any more."""

    turn: int


class Forget(_Message, tag=27):
    """A session has ended."""

    session: str


class Beat(_Message, tag=28):
    """The node lives.

    Args:
        use: `NodeUse` as a mapping; the node's `pid`; its process's processor time `cpu_s`, in seconds, and
            resident `memory`, in bytes.
    """

    use: dict[str, float]


class Leaving(_Message, tag=29):
    """The node would go: it wants no further jobs, and an `End` when those it has are done."""


# From both.


class Alive(_Message, tag=30):
    """The head lives."""


type ToNode = (
    Welcome
    | Refused
    | Perform
    | Interrupt
    | Collect
    | Close
    | SampleAt
    | HangUp
    | TurnFailed
    | Hold
    | End
    | Alive
)
type ToHead = (
    Ready | Performed | Collected | Closed | AskTurn | TurnSampled | TurnLeft | Forget | Beat | Leaving
)
type Message = ToNode | ToHead

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode.__value__)
_to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead.__value__)


def encode(message: Message) -> bytes:
    """A message as a frame's content."""
    return _encoder.encode(message)


def decode_to_node(frame: bytes) -> ToNode:
    """Raises:
    msgspec.MsgspecError: it is none.
    """
    return _to_node.decode(frame)


def decode_to_head(frame: bytes) -> ToHead:
    """Raises:
    msgspec.MsgspecError: it is none.
    """
    return _to_head.decode(frame)
