"""Groups and their jobs: admission control, submission, state, cancellation, retry."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from prorl_envs.env.base import Task
from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.api.errors import Conflict, NotFound, QueueFull
from prorl_envs.rollout.api.types import (
    BranchRequest,
    GroupRequest,
    JobState,
    StartingTurns,
    job_id,
    split_job_id,
)
from prorl_envs.rollout.api.views import GroupView, JobView
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.environments import EnvironmentRegistry
from prorl_envs.rollout.scheduling.fair_queue import COMMON, Share
from prorl_envs.rollout.service.branch_points import branch_points
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.leases import Leases
from prorl_envs.rollout.service.result_feed import Notifier
from prorl_envs.rollout.service.state import StateGuard
from prorl_envs.rollout.store.base import NewGroup, StoredGroup, group_statistics
from prorl_envs.rollout.store.sql import SqlStore

type Quota = tuple[str, int]
"""Prefix of a tenant's ids, and the tenant's maximum number of unfinished jobs and open episodes."""


@dataclass(eq=False)
class Groups:
    """Groups of a service.

    Args:
        guard: knows whether the service accepts groups now.
        environments: load the tasks of groups.
        queue: maximum number of unfinished jobs.
        episodes: interactive episodes, which count towards quotas.
        store: stores the groups.
        engine: runs the jobs.
        leases: cancel groups whose client sends no requests any more.
        notifier: wakes requests that wait for a result.
    """

    guard: StateGuard
    environments: EnvironmentRegistry
    queue: int
    episodes: InteractiveEpisodes
    store: SqlStore
    engine: Engine
    leases: Leases
    notifier: Notifier
    #: Maximum number of unfinished jobs and open episodes, by the prefix of a tenant's ids.
    _quotas: Mapping[str, int] = field(default_factory=dict, init=False)
    _reserved: Callable[[str], bool] | None = field(default=None, init=False)

    def limit_tenants(self, jobs: Mapping[str, int]) -> None:
        """Set each tenant's maximum number of unfinished jobs and open episodes, by the tenant's name."""
        self._quotas = {f"{name}/": limit for name, limit in jobs.items()}

    def quota_of(self, name: str) -> Quota | None:
        """Return the quota of the tenant that owns this id; None if it has no quota."""
        prefix = name.partition("/")[0] + "/"
        return (prefix, self._quotas[prefix]) if prefix in self._quotas else None

    def remaining_for(self, name: str) -> int:
        """Return the remaining job quota of the tenant that owns this id."""
        return self.remaining(self.quota_of(name))

    def remaining(self, quota: Quota | None) -> int:
        """Return the number of jobs that may still be accepted under a quota."""
        remaining = self.queue - len(self.engine.scheduler)
        if quota is not None:
            remaining = min(remaining, self._remaining_quota(quota))
        return max(0, remaining)

    async def _check_room(self, requests: Sequence[GroupRequest], quota: Quota | None) -> None:
        """Check that queue and quota have room for all of the groups.

        Raises:
            QueueFull: there is no room for them.
        """
        room = self.remaining(quota)
        if sum(request.samples for request in requests) <= room:
            return  # they fit even if all are new, so the store need not be queried for each
        new = 0
        for request in requests:
            new += 0 if await self._is_known(request.id) else request.samples
        if new > room:
            raise QueueFull(f"the queue has room for {room} of {new} new jobs", hint="try again later")

    async def _is_known(self, group_id: str) -> bool:
        with suppress(NotFound):
            await self.store.group(group_id)
            return True
        return False

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

    def reserve(self, reserved: Callable[[str], bool]) -> None:
        """Refuse groups with an id for which `reserved` returns True, except groups of batches."""
        self._reserved = reserved

    async def submit(
        self, requests: Sequence[GroupRequest], *, quota: Quota | None = None
    ) -> list[GroupView]:
        """Accept all groups, or none of them. A request that was accepted before has no further effect.

        Args:
            requests: the groups.
            quota: prefix of ids, and the maximum of unfinished jobs and open episodes with this prefix.

        Raises:
            InputError: an environment is not known, a task row is wrong, or a group cannot start as it wants.
            NotFound: a group starts with the turns of a job without a result.
            Conflict: an id is taken by another request.
            QueueFull: the queue or the quota has no room for all jobs of the groups.
            Unavailable: the service is not serving.
        """
        tasks = [self.environments.load(request) for request in requests]
        groups = [NewGroup(request, task.id) for request, task in zip(requests, tasks, strict=True)]
        await self._check_starts(requests)
        # If the caller disconnects here, a group that is stored must still be started, so a task of its own
        # does both. The task starts eagerly, because each iteration of a busy event loop takes long.
        accepting = asyncio.Task(
            self.accept(groups, tasks, quota=quota), loop=asyncio.get_running_loop(), eager_start=True
        )
        fresh = await asyncio.shield(accepting)
        return [
            self._view(_accepted(group)) if new else await self.group(group.request.id)
            for group, new in zip(groups, fresh, strict=True)
        ]

    async def _check_starts(self, requests: Sequence[GroupRequest]) -> None:
        found: dict[str, Collection[Sampled]] = {}
        for request in requests:
            if (start := request.start) is None or await self._is_known(request.id):
                continue
            earlier = await self.store.group(split_job_id(start.job_id)[0])
            if start.job_id not in found:
                found[start.job_id] = (await self.engine.answers(start.job_id)).values()
            answers = found[start.job_id]
            is_same = earlier.request.environment == request.environment
            if not is_same or len(answers) < start.turns or not all(answer.exact for answer in answers):
                raise InputError(
                    f"{request.id} cannot start with {start.turns} turns of {start.job_id}",
                    hint="the job must be of the same environment, with these turns in one row of exact"
                    " tokens",
                )

    async def accept(
        self,
        groups: Sequence[NewGroup],
        tasks: Sequence[Task],
        *,
        quota: Quota | None = None,
        share: Share = COMMON,
        on_stored: Callable[[], None] = lambda: None,
    ) -> list[bool]:
        """Store all groups, or none of them, and start the new ones.

        Args:
            tasks: the task of each group.
            quota: see `submit`.
            share: scheduling share of the groups' jobs.
            on_stored: called when the groups are stored, before any of their results is recorded.

        Returns:
            For each group, whether it is new.

        Raises:
            Conflict, QueueFull, Unavailable: see `submit`.
        """
        groups = [replace(group, request=self.environments.settled(group.request)) for group in groups]
        async with self.guard.lock:
            self.guard.check_open()
            for group in groups:
                if group.batch_id is None and self._reserved and self._reserved(group.request.id):
                    raise Conflict(f"{group.request.id!r} is the id of a batch's group", hint="use another")
            started_by = groups[0].batch_id if groups else None
            quota = quota or (self.quota_of(started_by) if started_by else None)
            await self._check_room([group.request for group in groups], quota)
            fresh = await self.store.submit(groups)
            on_stored()
            for group, task, new in zip(groups, tasks, fresh, strict=True):
                if new:
                    self.engine.admit(group.request, task, batch_id=group.batch_id, share=share)
                    self.leases.grant("groups", group.request.id, group.request.lease_s)
        return fresh

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        """Return the state of a group.

        Args:
            group_id: id of the group.
            wait_s: maximum seconds to wait until the group is complete.

        Raises:
            NotFound: no such group.
        """

        async def look() -> tuple[GroupView, bool]:
            view = self._view(await self.store.group(group_id))
            return view, view.complete

        return await self.notifier.follow(look, group_id, wait_s)

    async def job(self, job: str, *, wait_s: float = 0.0) -> JobView:
        """Return the state of a job.

        Args:
            job: id of the job.
            wait_s: maximum seconds to wait until the job is finished.

        Raises:
            NotFound: no such job.
        """
        group_id, sample = split_job_id(job)

        async def look() -> tuple[JobView, bool]:
            group = await self.store.group(group_id) if group_id else None
            if group is None or sample >= group.request.samples:
                raise NotFound(f"no job {job!r}", hint="job ids are <group id>/<index>")
            view = self._current(group.jobs[sample])
            return view, view.state.final

        return await self.notifier.follow(look, group_id, wait_s)

    async def cancel_job(self, job: str) -> JobView:
        """Cancel a job in any state. Returns once its result is recorded; its sandbox is closed after that.

        Raises:
            NotFound: no such job.
        """
        await self.job(job)
        await self.engine.cancel([job])
        return await self.job(job)

    async def cancel(self, group_id: str) -> GroupView:
        """Cancel the unfinished jobs of a group.

        Raises:
            NotFound: no such group.
        """
        group = await self.store.group(group_id)
        await self.engine.cancel(job_id(group_id, sample) for sample in range(group.request.samples))
        return await self.group(group_id)

    async def retry(self, job: str, *, quota: Quota | None = None) -> GroupView:
        """Run a finished job again, as a new group with one sample. Idempotent.

        The existing result stays. The new job has the same task, limits and sampling.

        Args:
            job: id of the finished job.
            quota: see `submit`.

        Raises:
            NotFound: there is no such job.
            Conflict: the job is not finished.
            InputError: the id of the new group would be too long.
            QueueFull, Unavailable: see `submit`.
        """
        if not (await self.job(job)).state.final:
            raise Conflict(f"job {job!r} is not finished", hint="cancel it first")
        [group] = await self._run_again(job, "retry", [None], quota=quota)
        return group

    async def branch(
        self, job: str, request: BranchRequest, *, quota: Quota | None = None
    ) -> list[GroupView]:
        """Start groups with the first turns of a job, which goes on itself. Idempotent.

        Args:
            job: id of the job; for a `policy` it must be finished.
            quota: see `submit`.

        Raises:
            NotFound: there is no such job, or no stored result for a policy.
            InputError: the job has no such turns, or the id of a new group would be too long.
            QueueFull, Unavailable: see `submit`.
        """
        turns = request.turns or branch_points(await self.store.result(job), request)
        return await self._run_again(job, "branch", turns, samples=request.samples, quota=quota)

    async def rewind(self, job: str, turns: int, *, quota: Quota | None = None) -> GroupView:
        """Cancel a job, if it still runs, and go on from an earlier turn, as a new group. Idempotent.

        Raises:
            NotFound, InputError, QueueFull, Unavailable: see `branch`; then the job goes on.
        """
        [group] = await self._run_again(job, "rewind", [turns], quota=quota)
        await self.engine.cancel([job])
        return group

    async def _run_again(
        self, job: str, kind: str, turns: Sequence[int | None], *, samples: int = 1, quota: Quota | None
    ) -> list[GroupView]:
        """Submit a group for each number of the job's turns to start with; None starts as the job did."""
        earlier = (await self.store.group((await self.job(job)).group_id)).request
        groups = [_derived(earlier, job, kind, samples, count) for count in turns]
        return await self.submit(groups, quota=quota)

    def _view(self, group: StoredGroup) -> GroupView:
        return GroupView(
            id=group.request.id,
            environment=group.request.environment,
            task_id=group.task_id,
            jobs=[self._current(job) for job in group.jobs],
            complete=group.complete,
            statistics=group_statistics(group),
            batch_id=group.batch_id,
        )

    def _current(self, job: JobView) -> JobView:
        """Return the current state of a stored job."""
        if job.state.final:
            return job
        state, running = self.engine.scheduler.state(job.id), self.engine.jobs.get(job.id)
        attempts = running.attempts if running else 0
        return job.model_copy(update={"state": state or JobState.QUEUED, "attempts": attempts})


def _derived(earlier: GroupRequest, job: str, kind: str, samples: int, turns: int | None) -> GroupRequest:
    """Return the request of a group that runs the task of a job again, with the job's limits and sampling.

    Raises:
        InputError: its id would be too long.
    """
    sample = split_job_id(job)[1]
    fields = earlier.model_dump(exclude_unset=True)
    name = f"{earlier.id}:{kind}-{sample}" + (f"-{turns}" if turns else "")
    start = StartingTurns(job_id=job, turns=turns) if turns else earlier.start
    fields |= {"id": name, "samples": samples, "branch_at": 0, "start": start}
    fields["metadata"] = {**earlier.metadata, f"{kind}_of": job}
    if earlier.sampling.seed is not None:
        fields["sampling"] = {**fields["sampling"], "seed": earlier.sampling.seed + sample}
    try:
        return GroupRequest.model_validate(fields)
    except ValueError as error:  # each group that is derived from a derived one has a longer id
        raise InputError(f"the id {name!r} of the new group would be too long") from error


def _accepted(group: NewGroup) -> StoredGroup:
    """Return a newly accepted group as the store would return it, without a query."""
    name, samples = group.request.id, range(group.request.samples)
    jobs = tuple(
        JobView(id=job_id(name, i), group_id=name, sample=i, state=JobState.QUEUED, attempts=0)
        for i in samples
    )
    return StoredGroup(group.request, group.task_id, jobs, failures=(0,) * len(jobs))
