"""The wire format of episodes that a caller drives step by step."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    Tag,
    field_validator,
    model_validator,
)

from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.types import (
    AgentLimits,
    Failure,
    GroupRequest,
    JobId,
    Result,
    StopReason,
    checked_json,
)

#: Token ids of one step: far more than any context takes.
MAX_IDS = 4_000_000
MAX_CALLS = 64

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EpisodeRequest(_Wire):
    """Ask for an episode to drive.

    Args:
        id: the caller's; asking again with the same request is the same episode.
        environment: name of a registered environment family.
        task: one data row of that family.
        sampling: for the service's own loop.
        limits: as of a job. `run_s` counts the seconds of steps, and not those between them.
        idle_s: seconds without a request after which it is closed; None, or more than the service allows,
            takes what the service allows.
    """

    id: JobId
    environment: str = Field(min_length=1, max_length=100)
    task: dict[str, Any]
    sampling: Sampling = Sampling()
    limits: AgentLimits = AgentLimits()
    idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @field_validator("task")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        return checked_json(value)

    def as_group(self) -> GroupRequest:
        """The same, as a group of one."""
        return GroupRequest(
            id=self.id,
            environment=self.environment,
            task=self.task,
            sampling=self.sampling,
            limits=self.limits,
        )


class _Step(_Wire):
    step: int | None = Field(
        default=None, ge=0, description="Number of this step; the same again is not done twice."
    )


class CallRequest(_Wire):
    """A tool call that the caller read from what its model said."""

    id: str = Field(default="", max_length=200)
    name: str = Field(min_length=1, max_length=200)
    arguments: dict[str, Any] = Field(default_factory=dict)


class CallStep(_Step):
    """Run tool calls. The service sees no tokens then, and keeps none.

    Args:
        tool_calls: in order.
        content: what the model said beside them.
    """

    tool_calls: list[CallRequest] = Field(min_length=1, max_length=MAX_CALLS)
    content: str = ""


class TokenStep(_Step):
    """An answer that the caller's model sampled, read and acted upon by the service.

    Args:
        ids: the sampled tokens, a stop token included.
        logprobs: one per token; None where the caller keeps them to itself.
        finish_reason: why sampling ended.
        weight_version: of the weights that sampled it.
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
    """Let the service's own loop take over, with its model servers, until it ends."""

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
    """Where an episode is. It is driven where it is `ready`, and graded there or where it is `stopped`."""

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
        """Whether the service is at work on it."""
        return self in (EpisodeState.WAITING, EpisodeState.INIT, EpisodeState.RUN, EpisodeState.EVAL)


class PromptView(_Wire):
    """What an episode begins with.

    Args:
        messages: in OpenAI shape.
        tools: in OpenAI function format.
        ids: both as tokens, ready for the first answer.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    ids: list[int]


class StepView(_Wire):
    """What came of a step.

    Args:
        step: its number, from 0.
        messages: what it added to the conversation: answers, and what the tools said to them.
        ids: tokens to append to the context after the sampled ones, before the next answer; None where the
            caller gave none.
        stop_reason: why the loop ended; None where it may go on.
    """

    step: int
    messages: list[dict[str, Any]]
    ids: list[int] | None
    stop_reason: StopReason | None


class EpisodeView(_Wire):
    """An episode.

    Args:
        state: where it is.
        steps: how many steps were begun; the number of the next one.
        prompt: once it is there; in the answers to beginning and looking alone.
        last: what came of the last step.
        failure: what broke it, where something did. There is no further attempt.
        result: what it came to, in the format of jobs, with reward, evidence and tokens; once it was graded
            or has failed.
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


class EndpointView(_Wire):
    """Where an agent finds its model.

    Args:
        key: of the endpoint, and of nothing else: whoever has it speaks as this episode's model caller.
        anthropic_base_url, openai_base_url: what the vendors' clients are given, as this request reached the
            service.
    """

    key: str
    anthropic_base_url: str
    openai_base_url: str
