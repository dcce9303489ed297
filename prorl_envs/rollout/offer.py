"""What a service offers: its environments, and what a request to one of them gets where it does not say."""

from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Task
from prorl_envs.env.registry import known
from prorl_envs.errors import InputError
from prorl_envs.rollout.defaults import Defaults
from prorl_envs.rollout.episode_types import EpisodeRequest
from prorl_envs.rollout.stages import Family
from prorl_envs.rollout.types import GroupRequest
from prorl_envs.rollout.views import EnvironmentView


class Offer:
    """The environments of a service.

    Args:
        families: environment classes by name.
        defaults: by environment, the limits and the sampling of a request that names none.
    """

    def __init__(
        self, families: Mapping[str, Family], defaults: Mapping[str, Defaults] | None = None
    ) -> None:
        self._families = families
        self._defaults = defaults or {}

    def load(self, request: GroupRequest | EpisodeRequest) -> Task:
        """The validated task of a request.

        Raises:
            InputError: its environment is not known, or the row is wrong.
        """
        task: Task = known(self._families, request.environment).load(request.task)
        return task

    def settled(self, request: GroupRequest) -> GroupRequest:
        """The request with its environment's own defaults in it: what is stored says all of itself."""
        return self._defaults_of(request.environment).applied(request)

    def row_of(self, environment: str, row: dict[str, Any]) -> dict[str, Any]:
        """A data row in the family's own words: its id may be called `instance_id`, as SWE-bench calls it.

        Raises:
            InputError: the environment is not known, or the row is wrong either way.
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
        """The environments, for callers."""
        return [
            EnvironmentView(
                name=name,
                task_schema=family.task_type.model_json_schema(),
                about=(family.__doc__ or "").partition("\n")[0],
                limits=dict(self._defaults_of(name).limits),
                sampling=dict(self._defaults_of(name).sampling),
            )
            for name, family in sorted(self._families.items())
        ]

    def _defaults_of(self, environment: str) -> Defaults:
        return self._defaults.get(environment, Defaults())
