"""`NodeHandle`: what the head needs of a node, and the data that the two exchange.

A node carries out whole attempts: INIT, RUN with its model calls, EVAL and close all happen on the node, next
to the sandbox. The head decides which attempts and when, and which model server samples a turn; tokens,
prompts and tool output stay on the node until the result is requested. An `order` numbers an attempt on a
node, a `turn` a model call in RUN. All arguments and results can be pickled.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prorl_envs.errors import ModelError
from prorl_envs.model.types import FinishReason
from prorl_envs.rollout.api.interactive import StepRequest
from prorl_envs.rollout.api.types import Failure, GroupRequest, Stage
from prorl_envs.rollout.episode.job import AttemptReport
from prorl_envs.rollout.scheduling.placement import StageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Requirements for nodes, and settings that nodes receive.

    Args:
        environments: names that a node must know.
        fingerprint: of the head's tokenizer and chat template: a node's must be the same.
        tokenizer: folder or Hub name of the model's tokenizer; `model`: its name, or ""; `protocol`: of model
            servers whose URL names none.
        tool_format: how the model writes tool calls; `reasoning`: how earlier reasoning is treated.
        heartbeat_s: seconds between two `usage` calls; `heartbeat_timeout_s`: seconds without an answer (for
            a node: without a call) after which the other side is considered lost.
        grace_s, close_s: as in the service's settings.
        start_s: seconds that a node gets to prepare itself.
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
        version: of its package.
        limits: concurrency limits of the node.
        environments: their names.
        fingerprint: of the tokenizer and its chat template.
    """

    version: str
    limits: StageLimits
    environments: Collection[str]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Request to carry out a stage.

    Args:
        request: the group, with INIT; else None. `sample`: the job's index in it.
        attempt: of the job, from 1.
        trace: context of the stage's span, as W3C trace headers.
        caller: RUN is driven by a caller, and this is one step of it: `step`, or without it the rendering of
            the prompt.
    """

    order: int
    stage: Stage
    attempt: int
    sample: int
    request: GroupRequest | None
    trace: Mapping[str, str]
    caller: bool = False
    step: StepRequest | None = None


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """Outcome of a stage, of which no part runs any more.

    Args:
        seconds: active time of the stage, or of the step.
        failure: its failure, or None.
        report: of the attempt. Complete if the attempt is graded; else without messages and tokens.
    """

    seconds: float
    failure: Failure | None
    report: AttemptReport


@dataclass(frozen=True, slots=True)
class TurnRequested:
    """A turn, or a part of one, needs a model server.

    Args:
        tokens: length of its prompt.
    """

    turn: int
    session: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TurnAbandoned:
    """The node no longer waits for the turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session samples no further turn."""

    session: str


type RoutingRequest = TurnRequested | TurnAbandoned | SessionClosed


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Model server that the router chose for a turn.

    Args:
        url: base URL, as in trajectories; `address`: the URL with its protocol, if one was given.
        version: of its weights, as far as the head knows.
    """

    url: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """Outcome of one call of a model server, without its tokens.

    Args:
        finish_reason: as of `Sampled`; `version`: of the newest weights; `cached`: cached prompt tokens.
        error: why it failed, or None.
        complaints: number of overload reports of the server to this node so far.
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
        closed: no turn starts. Deadlines are suspended for turns that are held.
        resample: turns that are interrupted now are sampled again from their start.
    """

    closed: bool = False
    resample: bool = False


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """Current use of a node.

    Args:
        values: of `env.node.NodeUse` and of the node's process (`pid`, `cpu_s`, `memory`).
    """

    values: Mapping[str, float] = field(default_factory=dict)


class NodeHandle(Protocol):
    """The head's access to one node. Every method raises `NodeLost` if the node is gone.

    Calls may overtake each other, and none is ever repeated by the transport.
    """

    async def prepare(self, terms: Terms) -> NodeInfo:
        """Prepare the node; the first call.

        Raises:
            InputError: the tokenizer or an environment is missing on the node.
            SandboxError: the machine cannot run sandboxes.
        """
        ...

    async def perform(self, order: StageOrder) -> StageOutcome:
        """Carry out a stage. Returns only when no part of it runs any more, also after an interrupt."""
        ...

    async def interrupt(self, order: int) -> bool:
        """Cancel the running stage of an attempt. Return False if none is running (yet)."""
        ...

    async def collect(self, order: int) -> AttemptReport | None:
        """Return the complete report of an attempt; None if the node does not know it."""
        ...

    async def close(self, order: int) -> bool:
        """Close the attempt's environment and forget the attempt. Return whether it closed in order."""
        ...

    async def hold(self, hold: Hold) -> None:
        """Set the state of the weight update."""
        ...

    async def routing(self) -> list[RoutingRequest]:
        """Return the next requests to the router, oldest first. Waits for the first one."""
        ...

    async def sample(self, turn: int, call: int, server: ServerChoice) -> TurnOutcome:
        """Sample a turn on a model server; the tokens stay on the node.

        Args:
            call: number of this call among those of the turn, from 1.
        """
        ...

    async def stop_turn(self, turn: int, call: int, error: ModelError | None = None) -> None:
        """Cancel a call of a turn, and return when it has stopped. Its tokens are discarded.

        Args:
            call: also cancels the calls before it.
            error: fails the turn, since no server can sample it. Without it, the turn is routed again.
        """
        ...

    async def usage(self) -> NodeUsage:
        """Return the current use of the node. A node that does not answer in time is considered lost."""
        ...

    async def shutdown(self) -> None:
        """Stop every stage and close everything."""
        ...
