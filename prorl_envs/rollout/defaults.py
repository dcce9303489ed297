"""What a request gets where it does not say: an environment's own limits and sampling. Pure."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.types import AgentLimits, GroupRequest


@dataclass(frozen=True, slots=True)
class Defaults:
    """Fields of `AgentLimits` and `Sampling`, as far as an environment has its own."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, limits: Mapping[str, Any], sampling: Mapping[str, Any]) -> "Defaults":
        """Checked.

        Raises:
            InputError: a field is not known, or its value is wrong.
        """
        _check(AgentLimits, limits, f"environments.{name}.limits")
        _check(Sampling, sampling, f"environments.{name}.sampling")
        return cls(limits, sampling)

    def applied(self, request: GroupRequest) -> GroupRequest:
        """`request` with all limits and sampling settled: what it names itself counts first."""
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
        close = difflib.get_close_matches(key, model.model_fields, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(model.model_fields)}"
        raise InputError(f"{where}.{key}: not known", hint=hint) from error
