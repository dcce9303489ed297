"""How much may still be accepted: the queue has a bound, and so has each tenant."""

from collections.abc import Callable, Mapping, Sequence

from prorl_envs.rollout.engine import Engine
from prorl_envs.rollout.episodes import Episodes
from prorl_envs.rollout.errors import Full, NotFound
from prorl_envs.rollout.store import Store
from prorl_envs.rollout.types import GroupRequest

type Quota = tuple[str, int]
"""How ids of a tenant begin, and the unfinished jobs and open episodes it may have."""


class Room:
    """The room of a service.

    Args:
        bound: unfinished jobs that the queue may hold, now.
        engine: knows the unfinished jobs.
        episodes: those that callers drive.
        store: knows which groups are there already.
    """

    def __init__(self, bound: Callable[[], int], engine: Engine, episodes: Episodes, store: Store) -> None:
        self._bound = bound
        self._engine = engine
        self._episodes = episodes
        self._store = store
        #: By how ids of a tenant begin, the unfinished jobs it may have.
        self.quotas: Mapping[str, int] = {}

    def quota_of(self, name: str) -> Quota | None:
        """Of the tenant whose id this is; None where it has no bound of its own."""
        prefix = name.partition("/")[0] + "/"
        return (prefix, self.quotas[prefix]) if prefix in self.quotas else None

    def left_for(self, name: str) -> int:
        """Jobs that may still be accepted of whom this id is."""
        return self.left(self.quota_of(name))

    def left(self, quota: Quota | None) -> int:
        """Jobs that may still be accepted under a quota."""
        room = self._bound() - len(self._engine.scheduler)
        if quota is not None:
            room = min(room, self._left_of(quota))
        return max(0, room)

    async def check(self, requests: Sequence[GroupRequest], quota: Quota | None) -> None:
        """Raises:
        Full: there is no room for all of them.
        """
        room = self.left(quota)
        if sum(request.samples for request in requests) <= room:
            return  # whichever of them are known already: no need to ask the store for each
        new = 0
        for request in requests:
            try:
                await self._store.group(request.id)
            except NotFound:
                new += request.samples
        if new > room:
            raise Full(f"the queue has room for {room} of {new} new jobs", hint="try again later")

    def check_episode(self, name: str, quota: Quota | None) -> None:
        """Raises:
        Full: the quota has no room for an episode of this id.
        """
        if quota is not None and name not in self._episodes and self._left_of(quota) < 1:
            raise Full(f"{quota[1]} unfinished jobs and episodes are the bound", hint="try again later")

    def _left_of(self, quota: Quota) -> int:
        prefix, most = quota
        return most - self._engine.unfinished_of[prefix] - self._episodes.count(prefix)
