"""What passes between NeMo Gym and a resources server of ours: its settings, the requests, the answers."""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

from typing import Literal

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
)
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator

from prorl_envs.env.base import Grade
from prorl_envs.errors import RolloutFailure
from prorl_envs.nemo.failures import failure_kind
from prorl_envs.tools.types import JsonObject

#: Does this NeMo Gym leave masked samples out of its metrics by itself (0.5 and later)?
KNOWS_MASKS = "mask_sample" in BaseVerifyResponse.model_fields

#: What to answer where there is no reward; see `masks`.
FailureMode = Literal["auto", "error", "mask"]


def masks(mode: FailureMode) -> bool:
    """Whether a failure is answered with a masked sample, and not with an error."""
    return mode == "mask" or (mode == "auto" and KNOWS_MASKS)


class EnvironmentServerConfig(BaseResourcesServerConfig):
    """The server's block in the YAML file.

    Args:
        environment: name of the family.
        failures: what `/verify` answers where there is no reward: `error` an HTTP error, which fails the
            rollout; `mask` a response with `mask_sample: true`, whose `reward: 0.0` is a placeholder; `auto`
            masks where NeMo Gym knows masks, else errs.
        max_sessions: sandboxes at one time; further episodes wait.
        idle_s: seconds without a request after which an episode is ended.
        init_s, eval_s: seconds the start and the grader may take.
        max_turns: answers after which `/step` grades and truncates. Keep it at or below the agent's
            `max_steps`: past those the agent gives up without a grade.
    """

    environment: str
    failures: FailureMode = "auto"
    max_sessions: int = Field(default=64, ge=1)
    idle_s: float = Field(default=1800.0, gt=0)
    init_s: float = Field(default=600.0, gt=0)
    eval_s: float = Field(default=900.0, gt=0)
    max_turns: int = Field(default=30, ge=1)

    @field_validator("num_workers", check_fields=False)
    @classmethod
    def _one_worker(cls, value: int | None) -> int | None:
        if value is not None and value > 1:
            raise ValueError("episodes live in one process: leave num_workers at 1 and start more instances")
        return value

    @property
    def masks(self) -> bool:
        return masks(self.failures)


class SeedRequest(BaseModel):
    """A whole NeMo Gym row; only its task is read."""

    model_config = ConfigDict(extra="allow")


class SeedResponse(BaseModel):
    """Nothing: the session travels in the cookie."""


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


class VerifyResponse(BaseVerifyResponse):
    """The verdict. `reward` means something only where `mask_sample` is false."""

    model_config = ConfigDict(extra="allow")

    environment: str
    task_id: str = ""
    reward_components: dict[str, float] = Field(default_factory=dict)
    evidence: JsonObject = Field(default_factory=dict)
    mask_sample: bool = False
    failure_kind: str | None = None
    failure_reason: str | None = None


class ResetResponse(BaseModel):
    observation: str | None = None
    info: JsonObject = Field(default_factory=dict)


class StepRequest(BaseModel):
    """A whole row with the model's latest answer."""

    model_config = ConfigDict(extra="allow")
    response: NeMoGymResponse


class StepResponse(BaseModel):
    observation: str | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: JsonObject = Field(default_factory=dict)


def details(grade: Grade) -> JsonObject:
    """A grade beyond its scalar."""
    return {"reward_components": dict(grade.components), "evidence": grade.evidence}


def graded(grade: Grade) -> JsonObject:
    """The fields of a verify response that has a reward."""
    return {"reward": grade.reward} | details(grade)


def masked(failure: RolloutFailure) -> JsonObject:
    """The fields of a verify response that has none."""
    verdict: JsonObject = {
        "reward": 0.0,
        "mask_sample": True,
        "failure_kind": failure_kind(failure),
        "failure_reason": str(failure)[:2000],
    }
    # Without masks of its own, NeMo Gym keeps what carries this key out of the rollouts and in a file beside.
    return verdict if KNOWS_MASKS else verdict | {"_ng_failure_class": failure_kind(failure)}
