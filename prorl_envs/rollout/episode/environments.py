"""Environment registry: the environments that a service offers, and the defaults of requests to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from prorl_envs.env.audit.record import AuditRecord
from prorl_envs.env.base import Task
from prorl_envs.env.harness.family import harness_of
from prorl_envs.env.registry import description_of, known
from prorl_envs.errors import InputError, name_hint
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.interactive import EpisodeRequest
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.rollout.api.views import EnvironmentView
from prorl_envs.rollout.episode.stages import Family


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


class EnvironmentRegistry:
    """Registry of the environments of a service.

    Args:
        families: environment classes by name.
        defaults: limits and sampling for requests that set none, by environment.
        record: record of an audit that tasks must have passed; None admits all.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        defaults: Mapping[str, Defaults] | None = None,
        record: AuditRecord | None = None,
    ) -> None:
        self._families = families
        self._record = record
        self._defaults = defaults or {}

    def __contains__(self, name: object) -> bool:
        return name in self._families

    def load(self, request: GroupRequest | EpisodeRequest) -> Task:
        """Return the validated task of a request.

        Raises:
            InputError: the environment is not known, or the task row is invalid or did not pass the audit.
        """
        family = known(self._families, request.environment)
        task: Task = family.load(request.task)
        if self._record is not None and (reason := self._record.refusal(family, task)):
            raise InputError(
                f"{task.id}: {reason}", hint="the setting service.require_audit demands an audit"
            )
        return task

    def settled(self, request: GroupRequest) -> GroupRequest:
        """Return the request with the environment's defaults filled in. The stored request is complete, so
        later changes of the defaults do not affect it.

        Raises:
            InputError: the environment cannot branch, or not at this turn.
        """
        settled = self._defaults_of(request.environment).applied(request)
        family, turns = self._families[request.environment], settled.limits.max_turns
        if request.branch_at or request.start is not None:
            if harness_of(family) is not None or (request.branch_at and not family.takes_checkpoints):
                raise InputError(
                    f"episodes of {request.environment} cannot branch", hint="leave out branch_at and start"
                )
            if max(request.branch_at, request.start.turns if request.start else 0) >= turns:
                raise InputError(f"the turns before the branch are not below limits.max_turns, {turns}")
        return settled

    def row_of(self, environment: str, row: dict[str, Any]) -> dict[str, Any]:
        """Return a data row with the environment's field names: a row whose id is in `instance_id`, as in
        SWE-bench, is accepted if the environment wants `id`.

        Raises:
            InputError: the environment is not known, or the row is invalid with either name.
        """
        family = known(self._families, environment)
        renamed = {("id" if key == "instance_id" else key): value for key, value in row.items()}
        try:
            family.load(row)
        except InputError:
            if len(renamed) < len(row) or "instance_id" not in row:
                raise
            family.load(renamed)
            return renamed
        return row

    def views(self) -> list[EnvironmentView]:
        """Return the environments as API views."""
        return [
            EnvironmentView(
                name=name,
                task_schema=family.task_type.model_json_schema(),
                description=description_of(family),
                limits=dict(self._defaults_of(name).limits),
                sampling=dict(self._defaults_of(name).sampling),
            )
            for name, family in sorted(self._families.items())
        ]

    def _defaults_of(self, environment: str) -> Defaults:
        return self._defaults.get(environment, Defaults())


def _check(model: type[BaseModel], values: Mapping[str, Any], where: str) -> None:
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] != "extra_forbidden":
            raise InputError(f"{where}.{key}: {first['msg']}") from error
        raise InputError(f"{where}.{key}: not known", hint=name_hint(key, model.model_fields)) from error
