"""Wire format of interactive episodes, which a caller drives step by step."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, FiniteFloat, Tag, model_validator

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import (
    AgentLimits,
    Failure,
    GroupRequest,
    JobId,
    JsonFields,
    Result,
    StopReason,
    WireModel,
)

#: Maximum number of token ids in one step: far more than any context has.
MAX_IDS = 4_000_000
#: Maximum number of tool calls in one step.
MAX_CALLS = 64

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class EpisodeRequest(WireModel):
    """Request for an interactive episode.

    Args:
        id: the caller's id; repeating the same request returns the same episode.
        environment: name of a registered environment family.
        task: one data row of that family.
        sampling: sampling parameters of the service's own agent loop.
        limits: limits of the episode. `run_s` counts only the seconds of steps, not the time between them.
        idle_s: seconds without a request after which the episode is closed; None, or a value above the
            service's limit, takes the service's limit.
        endpoint: the caller will open the model endpoint. The episode then runs on the service's machine.
    """

    id: JobId
    environment: str = Field(min_length=1, max_length=100)
    task: JsonFields
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    endpoint: bool = False

    def as_group(self) -> GroupRequest:
        """Return the same request as a group with one sample."""
        return GroupRequest(
            id=self.id,
            environment=self.environment,
            task=self.task,
            sampling=self.sampling,
            limits=self.limits,
        )


class _Step(WireModel):
    step: int | None = Field(
        default=None, ge=0, description="Number of this step. A repeated step is not run twice."
    )


class CallRequest(WireModel):
    """Tool call that the caller parsed from its model's answer."""

    id: str = Field(default="", max_length=200)
    name: str = Field(min_length=1, max_length=200)
    arguments: dict[str, Any] = Field(default_factory=dict)


class CallStep(_Step):
    """Step that runs tool calls. It contains no tokens, so the service records none.

    Args:
        tool_calls: calls, in the order in which they run.
        content: text that the model wrote beside the calls.
    """

    tool_calls: list[CallRequest] = Field(min_length=1, max_length=MAX_CALLS)
    content: str = ""


class TokenStep(_Step):
    """Step with an answer that the caller's model sampled. The service parses it and runs its tool calls.

    Args:
        ids: the sampled tokens, including a stop token.
        logprobs: one per token; None if the caller does not share them.
        finish_reason: reason why sampling stopped.
        weight_version: version of the weights that sampled the answer.
    """

    ids: list[TokenId] = Field(max_length=MAX_IDS)
    logprobs: list[FiniteFloat] | None = Field(default=None, max_length=MAX_IDS)
    finish_reason: Literal["stop", "length"] = "stop"
    weight_version: str = Field(default="", max_length=200)

    @model_validator(mode="after")
    def _one_each(self) -> "TokenStep":
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError("logprobs and ids differ in length")
        return self


class AgentStep(_Step):
    """Step that hands the episode to the service's own agent loop and model servers until the loop stops."""

    agent: Literal[True]


def _kind(body: Any) -> str:
    fields = body if isinstance(body, dict) else vars(body) if isinstance(body, _Step) else {}
    return next((kind for kind in ("ids", "agent") if kind in fields), "tool_calls")


type StepRequest = Annotated[
    Annotated[CallStep, Tag("tool_calls")]
    | Annotated[TokenStep, Tag("ids")]
    | Annotated[AgentStep, Tag("agent")],
    Discriminator(_kind),
]


class EpisodeState(StrEnum):
    """State of an interactive episode. Steps need `ready`; grading needs `ready` or `stopped`."""

    WAITING = "waiting"
    INIT = "init"
    READY = "ready"
    RUN = "run"
    STOPPED = "stopped"
    EVAL = "eval"
    GRADED = "graded"
    FAILED = "failed"

    @property
    def busy(self) -> bool:
        """True while the service works on the episode."""
        return self in (EpisodeState.WAITING, EpisodeState.INIT, EpisodeState.RUN, EpisodeState.EVAL)


class PromptView(WireModel):
    """Initial prompt of an episode.

    Args:
        messages: chat messages in OpenAI's format.
        tools: tools in OpenAI's function format.
        ids: messages and tools as token ids, up to where the first answer starts.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: list[int]


class StepView(WireModel):
    """Outcome of a step.

    Args:
        step: number of the step, from 0.
        messages: messages that the step added to the conversation: answers and tool results.
        ids: token ids to append to the context after the sampled ids and before the next answer; None if the
            caller sent no token ids.
        stop_reason: reason why the agent loop stopped; None if it may continue.
    """

    step: int
    messages: list[dict[str, Any]]
    ids: list[int] | None
    stop_reason: StopReason | None


class EpisodeView(WireModel):
    """Interactive episode.

    Args:
        state: state of the episode.
        steps: number of started steps, which is also the number of the next step.
        prompt: initial prompt, once it exists; only in the responses to start and lookup requests.
        last: outcome of the last step.
        failure: the failure, if any. There is no further attempt.
        result: after grading or a failure, the result in the format of jobs: reward, evidence and tokens.
    """

    id: str
    environment: str
    task_id: str
    state: EpisodeState
    steps: int
    prompt: PromptView | None
    last: StepView | None
    failure: Failure | None
    result: Result | None


class EndpointView(WireModel):
    """Model endpoint for an agent.

    Args:
        key: key of this endpoint only; its holder can make model calls as this episode.
        anthropic_base_url, openai_base_url: base URLs for the vendors' clients. Their host is the one that
            this request was sent to.
    """

    key: str
    anthropic_base_url: str
    openai_base_url: str
