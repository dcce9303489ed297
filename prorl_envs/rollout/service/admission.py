"""Admission control: limits of the job queue and quotas of tenants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prorl_envs.rollout.api.errors import NotFound, QueueFull
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.store.sql import SqlStore

type Quota = tuple[str, int]
"""Prefix of a tenant's ids, and the tenant's maximum number of unfinished jobs and open episodes."""


@dataclass(eq=False)
class AdmissionControl:
    """Admission control of a service.

    Args:
        queue: maximum number of unfinished jobs.
        engine: counts the unfinished jobs.
        episodes: counts the interactive episodes.
        store: knows which groups exist.
    """

    queue: int
    engine: Engine
    episodes: InteractiveEpisodes
    store: SqlStore
    #: Maximum number of unfinished jobs and open episodes, by the prefix of a tenant's ids.
    quotas: Mapping[str, int] = field(default_factory=dict, init=False)

    def quota_of(self, name: str) -> Quota | None:
        """Return the quota of the tenant that owns this id; None if it has no quota."""
        prefix = name.partition("/")[0] + "/"
        return (prefix, self.quotas[prefix]) if prefix in self.quotas else None

    def remaining_for(self, name: str) -> int:
        """Return the remaining job quota of the tenant that owns this id."""
        return self.remaining(self.quota_of(name))

    def remaining(self, quota: Quota | None) -> int:
        """Return the number of jobs that may still be accepted under a quota."""
        remaining = self.queue - len(self.engine.scheduler)
        if quota is not None:
            remaining = min(remaining, self._remaining_quota(quota))
        return max(0, remaining)

    async def check(self, requests: Sequence[GroupRequest], quota: Quota | None) -> None:
        """Check that queue and quota have room for all of the groups.

        Raises:
            QueueFull: there is no room for them.
        """
        room = self.remaining(quota)
        if sum(request.samples for request in requests) <= room:
            return  # they fit even if all are new, so the store need not be queried for each
        new = 0
        for request in requests:
            try:
                await self.store.group(request.id)
            except NotFound:
                new += request.samples
        if new > room:
            raise QueueFull(f"the queue has room for {room} of {new} new jobs", hint="try again later")

    def check_episode(self, name: str, quota: Quota | None) -> None:
        """Check that the quota has room for an episode of this id.

        Raises:
            QueueFull: the quota is used up.
        """
        if quota is not None and name not in self.episodes and self._remaining_quota(quota) < 1:
            raise QueueFull(f"the quota is {quota[1]} unfinished jobs and episodes", hint="try again later")

    def _remaining_quota(self, quota: Quota) -> int:
        prefix, limit = quota
        return limit - self.engine.unfinished_of[prefix] - self.episodes.count(prefix)
