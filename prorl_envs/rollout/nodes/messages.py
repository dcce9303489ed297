"""Messages that head and node exchange: arguments and results of the methods of `NodeWorker`.

All stages of an attempt run on the same node, where its sandbox is. The head decides which stages a node runs
and when, and which model server samples each turn. Prompts and tool output stay on the node until the head
requests the result; sampled answers are sent at once, so that they outlive the node. `order` is the number of
an attempt on a node, `turn` the number of a model call in RUN. All arguments and results can be pickled.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prorl_envs.errors import ModelError
from prorl_envs.model.types import FinishReason, Sampled
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, GroupRequest, Result, Stage
from prorl_envs.rollout.episode.job import StepProgress
from prorl_envs.rollout.scheduling.placement import StageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requirements for nodes, and settings that nodes receive from the head.

    Args:
        environments: names of the environments that a node must have.
        fingerprint: fingerprint of the head's tokenizer and chat template. A node's must be equal.
        tokenizer: folder or Hub name of the model's tokenizer; `model`: name of the model, or "".
        protocol: protocol of model servers whose URL names none.
        tool_format: format of the model's tool calls; `reasoning`: handling of earlier turns' reasoning.
        heartbeat_s: seconds between two `usage` calls of the head.
        heartbeat_timeout_s: the head considers a node lost after this number of seconds without an answer;
            a node considers the head lost after this number of seconds without a call.
        grace_s, close_s: see the service's settings.
        start_s: maximum seconds for `prepare`.
    """

    environments: Collection[str]
    fingerprint: str
    tokenizer: str = ""
    model: str = ""
    protocol: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    tool_format: str = "auto"
    reasoning: Literal["keep", "user_turn", "template"] = "keep"
    heartbeat_s: float = 5.0
    heartbeat_timeout_s: float = 30.0
    grace_s: float = 30.0
    close_s: float = 60.0
    start_s: float = 300.0


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Description of a node that is ready.

    Args:
        version: version of `prorl_envs` on the node.
        limits: concurrency limits of the node.
        environments: names of the node's environments.
        fingerprint: fingerprint of the node's tokenizer and chat template.
    """

    version: str
    limits: StageLimits
    environments: Collection[str]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Request to run a stage.

    Args:
        request: the group, for INIT; else None. `sample`: index of the job in the group.
        trace: context of the stage's span, as W3C trace headers.
        caller: a caller drives RUN, and this request is for one `step`. Without it, render the prompt.
        recorded: answers of the jobs with whose turns the episode starts, for INIT.
        answers: answers of earlier attempts, for INIT, see `TurnJournal`.
    """

    order: int
    stage: Stage
    sample: int
    request: GroupRequest | None
    trace: Mapping[str, str]
    caller: bool = False
    step: StepRequest | None = None
    recorded: Mapping[bytes, Sampled] = field(default_factory=dict)
    answers: Mapping[bytes, Sampled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """Outcome of a stage that has stopped completely.

    Args:
        failure: failure of the stage, or None.
        result: result of the attempt so far. It has messages and tokens only if the attempt is graded. None
            if the node has no such attempt.
        progress: progress of an attempt that its caller drives, else None.
    """

    failure: Failure | None
    result: Result | None = None
    progress: StepProgress | None = None


@dataclass(frozen=True, slots=True)
class TurnRequested:
    """Request for a model server that samples a turn, or a part of a turn.

    Args:
        tokens: length of the prompt in tokens.
    """

    turn: int
    session: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TurnAbandoned:
    """Notice that the node no longer waits for a turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """Notice that a session will have no further turns."""

    session: str


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """Answer of a turn, for the journal of the attempt's job, see `TurnJournal`."""

    order: int
    history: bytes
    answer: Sampled


type NodeMessage = TurnRequested | TurnAbandoned | SessionClosed | TurnSampled


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Model server that the router chose for a turn.

    Args:
        url: base URL, as in trajectories; `address`: the URL with its protocol, if it was added with one.
        version: last version of the server's weights that the head knows.
    """

    url: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """Outcome of one call of a model server, without its tokens.

    Args:
        version: version of the newest weights that sampled tokens of the call.
        cached: number of prompt tokens in the server's cache; None if unknown.
        error: reason why the call failed, or None.
        complaints: total number of overload errors that this node has received from the server.
    """

    finish_reason: FinishReason = "abort"
    version: str = ""
    cached: int | None = None
    error: ModelError | None = None
    complaints: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """State of a weight update.

    Args:
        closed: no turn starts. Deadlines do not count the time for which turns are held.
        resample: a turn that is interrupted is sampled again from its start.
    """

    closed: bool = False
    resample: bool = False
