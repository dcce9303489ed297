"""Messages between a service (the head) and a node.

A node carries out whole attempts: INIT, RUN with its model calls, EVAL and close all happen on the node, next
to the sandbox. The head decides which attempts and when, and which model server samples a turn; tokens,
prompts and tool output stay on the node until the result is requested. An `order` numbers an attempt on a
node, a `turn` a model call in RUN.

Frames are MessagePack arrays that start with the message's tag (msgspec's `array_like`), so a field may be
appended only. Head and node have the same version of this package (`Ready`), so nothing else has to be
compatible.
"""

from typing import Literal

import msgspec

from prorl_envs.rollout.api.types import Stage


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# From the head.


class Hello(_Message, tag=1):
    """The first message: settings of the head.

    Args:
        version: of the head's package.
        tokenizer: folder or Hub name of the model's tokenizer; `model`: its name, or ""; `protocol`: of model
            servers whose URL names none.
        tool_format: how the model writes tool calls; `reasoning`: how earlier reasoning is treated.
        heartbeat_s: heartbeat interval, seconds; `heartbeat_timeout_s`: seconds without a message after which
            the other side is considered lost.
        grace_s, close_s: as in the service's settings.
    """

    version: str
    tokenizer: str
    model: str
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"]
    tool_format: str
    reasoning: Literal["keep", "user_turn", "template"]
    heartbeat_s: float
    heartbeat_timeout_s: float
    grace_s: float
    close_s: float


class JoinRefused(_Message, tag=2):
    """The node may not join."""

    reason: str
    hint: str


class Perform(_Message, tag=3):
    """Carry out a stage, and answer with `Performed`.

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


class InterruptJob(_Message, tag=4):
    """Cancel the running stage. `Performed` is still sent, when no part of the stage runs any more."""

    order: int


class Collect(_Message, tag=5):
    """Report the attempt's partial result in a `Collected`."""

    order: int


class CloseJob(_Message, tag=6):
    """Close the attempt's environment, answer with `Closed`, and forget the attempt."""

    order: int


class SampleAt(_Message, tag=7):
    """Sample the turn on this server.

    Args:
        url: base URL, as in trajectories; `address`: the URL with its protocol, if one was given.
        version: of its weights, as far as the head knows.
    """

    turn: int
    url: str
    address: str
    version: str


class CancelTurn(_Message, tag=8):
    """Cancel the call that samples this turn; its tokens are discarded."""

    turn: int


class TurnFailed(_Message, tag=9):
    """No server can sample this turn."""

    turn: int
    message: str
    hint: str


class Hold(_Message, tag=10):
    """A weight update starts or has finished.

    Args:
        closed: no turn starts. Deadlines are suspended for turns that are held.
        resample: turns that are interrupted now are sampled again from their start.
    """

    closed: bool
    resample: bool


class Shutdown(_Message, tag=11):
    """Close everything and exit."""


# From the node.


class Ready(_Message, tag=20):
    """The node can join.

    Args:
        name: of the node.
        init, run, eval, max_jobs_with_sandbox: concurrency limits of the node.
        environments: their names.
        fingerprint: of the tokenizer and its chat template.
    """

    name: str
    version: str
    init: int
    run: int
    eval: int
    max_jobs_with_sandbox: int
    environments: list[str]
    fingerprint: str


class SampledRow(_Message):
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
    """State of an attempt.

    Args:
        prompted, stop_reason, model_s, tools_s, held_s: as in `AttemptReport`.
        text: a JSON object with `messages`, `tools`, and of the grade `reward`, `components` and `evidence`;
            empty in a short report.
        rows: its tokens: the forks, and the trajectory last.
        unfinished_answers: see `Result`.
    """

    prompted: bool
    stop_reason: str | None
    model_s: float
    tools_s: float
    held_s: float
    text: bytes = b""
    rows: list[SampledRow] = []
    unfinished_answers: list[SampledRow] = []


class Performed(_Message, tag=21):
    """A stage has finished, and no part of it runs any more.

    Args:
        seconds: of active time.
        failure: as JSON, or empty.
        report: complete after EVAL, otherwise without text and tokens.
    """

    order: int
    seconds: float
    failure: bytes
    report: Report


class Collected(_Message, tag=22):
    order: int
    report: Report


class Closed(_Message, tag=23):
    """An environment is closed; `ok`: without an error."""

    order: int
    ok: bool


class RouteTurn(_Message, tag=24):
    """Request a server for this turn. Answered by `SampleAt`, or `TurnFailed`.

    Args:
        session: the job's session id for the model servers.
        tokens: number of prompt tokens.
    """

    turn: int
    session: str
    tokens: int


class TurnSampled(_Message, tag=25):
    """A call that `SampleAt` requested has finished. The sampled tokens stay on the node.

    Args:
        error: "" if it was sampled; `overloaded`, `unavailable` or `refused`: another server may succeed, and
            the head chooses it; `model`: the turn has failed.
        complaints: how often the server has reported overload.
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


class TurnAbandoned(_Message, tag=26):
    """The node no longer waits for this turn."""

    turn: int


class Forget(_Message, tag=27):
    """A session is closed."""

    session: str


class NodeHeartbeat(_Message, tag=28):
    """Heartbeat of the node.

    Args:
        use: `NodeUse` as a mapping; the node's `pid`; its process's processor time `cpu_s`, in seconds, and
            resident `memory`, in bytes.
    """

    use: dict[str, float]


class DrainRequest(_Message, tag=29):
    """The node asks to leave: it wants no further jobs, and a `Shutdown` when its jobs are done."""


# From both.


class HeadHeartbeat(_Message, tag=30):
    """Heartbeat of the head."""


type ToNode = (
    Hello
    | JoinRefused
    | Perform
    | InterruptJob
    | Collect
    | CloseJob
    | SampleAt
    | CancelTurn
    | TurnFailed
    | Hold
    | Shutdown
    | HeadHeartbeat
)
type ToHead = (
    Ready
    | Performed
    | Collected
    | Closed
    | RouteTurn
    | TurnSampled
    | TurnAbandoned
    | Forget
    | NodeHeartbeat
    | DrainRequest
)
type Message = ToNode | ToHead

_encoder = msgspec.msgpack.Encoder()
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode.__value__)
_to_head: msgspec.msgpack.Decoder[ToHead] = msgspec.msgpack.Decoder(ToHead.__value__)


def encode(message: Message) -> bytes:
    """Encode a message to a frame's content."""
    return _encoder.encode(message)


def decode_to_node(frame: bytes) -> ToNode:
    """Decode a frame from the head.

    Raises:
        msgspec.MsgspecError: it is not a message.
    """
    return _to_node.decode(frame)


def decode_to_head(frame: bytes) -> ToHead:
    """Decode a frame from a node.

    Raises:
        msgspec.MsgspecError: it is not a message.
    """
    return _to_head.decode(frame)
