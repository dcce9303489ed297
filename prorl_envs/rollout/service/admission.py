"""Admission control: limits of the job queue and quotas of tenants."""

from collections.abc import Mapping, Sequence

from prorl_envs.rollout.api.errors import NotFound, QueueFull
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.store.base import Store

type Quota = tuple[str, int]
"""The prefix of a tenant's ids, and the unfinished jobs and open episodes it may have."""


class AdmissionControl:
    """Admission control of a service.

    Args:
        queue: number of unfinished jobs that the queue may hold.
        engine: counts the unfinished jobs.
        episodes: the interactive episodes.
        store: knows which groups exist.
    """

    def __init__(self, queue: int, engine: Engine, episodes: InteractiveEpisodes, store: Store) -> None:
        self.queue = queue
        self._engine = engine
        self._episodes = episodes
        self._store = store
        #: By prefix of a tenant's ids, the unfinished jobs it may have.
        self.quotas: Mapping[str, int] = {}

    def quota_of(self, name: str) -> Quota | None:
        """Return the quota of the tenant that owns this id; None if it has no quota."""
        prefix = name.partition("/")[0] + "/"
        return (prefix, self.quotas[prefix]) if prefix in self.quotas else None

    def left_for(self, name: str) -> int:
        """Return the remaining job quota of the tenant that owns this id."""
        return self.left(self.quota_of(name))

    def left(self, quota: Quota | None) -> int:
        """Return the number of jobs that may still be accepted under a quota."""
        room = self.queue - len(self._engine.scheduler)
        if quota is not None:
            room = min(room, self._left_of(quota))
        return max(0, room)

    async def check(self, requests: Sequence[GroupRequest], quota: Quota | None) -> None:
        """Check that the queue has room for all of the groups.

        Raises:
            QueueFull: it has not.
        """
        room = self.left(quota)
        if sum(request.samples for request in requests) <= room:
            return  # even if all are new, they fit: no need to query the store for each
        new = 0
        for request in requests:
            try:
                await self._store.group(request.id)
            except NotFound:
                new += request.samples
        if new > room:
            raise QueueFull(f"the queue has room for {room} of {new} new jobs", hint="try again later")

    def check_episode(self, name: str, quota: Quota | None) -> None:
        """Check that the quota has room for an episode of this id.

        Raises:
            QueueFull: it has not.
        """
        if quota is not None and name not in self._episodes and self._left_of(quota) < 1:
            raise QueueFull(f"{quota[1]} unfinished jobs and episodes are the bound", hint="try again later")

    def _left_of(self, quota: Quota) -> int:
        prefix, most = quota
        return most - self._engine.unfinished_of[prefix] - self._episodes.count(prefix)
