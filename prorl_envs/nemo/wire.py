"""Messages between NeMo Gym and our resources servers: settings, requests, responses."""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

from pathlib import Path
from typing import Any, Literal

from nemo_gym import base_resources_server
from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prorl_envs.env.base import Grade
from prorl_envs.errors import RolloutFailure
from prorl_envs.nemo.failures import failure_kind
from prorl_envs.tools.types import JsonObject

#: True if NeMo Gym itself excludes masked samples from its metrics (0.5 and later).
KNOWS_MASKS = "mask_sample" in BaseVerifyResponse.model_fields

#: Keys of a server's block that NeMo Gym reads itself.
_FRAMEWORK_KEYS = frozenset(
    {"description", "value", "verified", "verified_url", "datasets", "allowed_agents", "allowed_model_types"}
    | {"skip_verification", "skip_verification_reward"}
)
#: True if NeMo Gym itself closes sessions (0.7).
KNOWS_SESSIONS = hasattr(base_resources_server, "ResourcesCloseSessionRequest")

#: Kind of response if there is no reward; see `EnvironmentServerConfig`.
FailureMode = Literal["auto", "error", "mask"]


def masks(mode: FailureMode) -> bool:
    """Return true if a failure is answered with a masked sample instead of an error."""
    return mode == "mask" or (mode == "auto" and KNOWS_MASKS)


class EnvironmentServerConfig(BaseResourcesServerConfig):
    """The server's block in the YAML file.

    Args:
        environment: name of the family, or of an environment in `config`.
        config: YAML file of settings with `environments`; None offers every registered family.
        failures: response of `/verify` if there is no reward. `error`: an HTTP error, which fails the
            rollout. `mask`: a response with `mask_sample: true`, whose `reward: 0.0` is a placeholder.
            `auto`: `mask` if NeMo Gym supports masks, else `error`.
        max_sessions: maximum concurrent sandboxes; further episodes wait.
        idle_s: seconds without a request after which an episode is closed; a sixth of them while others wait.
        queue_s: seconds that an episode waits for a sandbox at most.
        init_s, eval_s: timeouts of the start and of the grader, in seconds.
        max_turns: answers after which `/step` grades and truncates. It must not exceed the agent's
            `max_steps`, after which the agent stops without a grade.
    """

    environment: str
    config: Path | None = None
    failures: FailureMode = "auto"
    max_sessions: int = Field(default=64, ge=1)
    idle_s: float = Field(default=1800.0, gt=0)
    queue_s: float = Field(default=3600.0, gt=0)
    init_s: float = Field(default=600.0, gt=0)
    eval_s: float = Field(default=900.0, gt=0)
    max_turns: int = Field(default=30, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, block: Any) -> Any:
        unknown = set(block) - set(cls.model_fields) - _FRAMEWORK_KEYS if isinstance(block, dict) else ()
        if unknown:
            own = ", ".join(sorted(EnvironmentServerConfig.__annotations__))
            raise ValueError(f"no such setting: {', '.join(sorted(unknown))}; this server has {own}")
        return block

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
    """A whole NeMo Gym row, of which only the task is read; or a typed seed (0.7), with the task in
    `task_data` and the id of the session, which the caller chooses."""

    model_config = ConfigDict(extra="allow")
    resources_session_id: str | None = Field(default=None, min_length=1)
    task_data: JsonObject | None = None


class _Seeded(BaseModel):
    resources_session_id: str


#: Response to a typed seed.
SeededResponse = getattr(base_resources_server, "ResourcesSeedSessionResponse", _Seeded)


class SeedResponse(BaseModel):
    """Empty response to a seed without an id: the session id is in the cookie."""


class CloseRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    resources_session_id: str


class CloseResponse(BaseModel):
    resources_session_id: str


class VerifyRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")


#: Base of responses with components of the reward (0.7).
_Verdict: Any = getattr(base_resources_server, "BaseMultiRewardVerifyResponse", BaseVerifyResponse)


class VerifyResponse(_Verdict):
    """The verdict. `reward` is a placeholder if there is a `failure_kind`."""

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
    """Return the fields of a grade beyond its reward."""
    return {"reward_components": dict(grade.components), "evidence": grade.evidence}


def graded(grade: Grade) -> JsonObject:
    """Return the fields of a verify response with a reward."""
    return {"reward": grade.reward} | details(grade)


def masked(failure: RolloutFailure) -> JsonObject:
    """Return the fields of a verify response without a reward."""
    verdict: JsonObject = {
        "reward": 0.0,
        "mask_sample": True,
        "failure_kind": failure_kind(failure),
        "failure_reason": str(failure)[:2000],
    }
    # A NeMo Gym without masks moves samples with this key out of the rollouts, into a separate file.
    return verdict if KNOWS_MASKS else verdict | {"_ng_failure_class": failure_kind(failure)}
