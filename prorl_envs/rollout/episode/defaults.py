"""An environment's own defaults for the limits and sampling that a request does not set. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from prorl_envs.errors import InputError, name_hint
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest


@dataclass(frozen=True, slots=True)
class Defaults:
    """An environment's own defaults for fields of `AgentLimits` and `Sampling`."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, limits: Mapping[str, Any], sampling: Mapping[str, Any]) -> "Defaults":
        """Check the fields and build the defaults of the environment `name`.

        Raises:
            InputError: a field is not known, or its value is wrong.
        """
        _check(AgentLimits, limits, f"environments.{name}.limits")
        _check(Sampling, sampling, f"environments.{name}.sampling")
        return cls(limits, sampling)

    def applied(self, request: GroupRequest) -> GroupRequest:
        """Return `request` with defaults filled in; fields that the request sets take precedence."""
        limits = {**self.limits, **request.limits.model_dump(exclude_unset=True)}
        sampling = {**self.sampling, **request.sampling.model_dump(exclude_unset=True)}
        return request.model_copy(update={"limits": AgentLimits(**limits), "sampling": Sampling(**sampling)})


def _check(model: type[BaseModel], values: Mapping[str, Any], where: str) -> None:
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] != "extra_forbidden":
            raise InputError(f"{where}.{key}: {first['msg']}") from error
        raise InputError(f"{where}.{key}: not known", hint=name_hint(key, model.model_fields)) from error
