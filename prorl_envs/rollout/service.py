"""The rollout service: takes groups, carries their jobs through the stages, keeps the results.

The scheduler decides, the worker does, the engine connects the two, the store keeps; this is the face that
callers see.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.config import ServiceSettings
from prorl_envs.env.base import Task
from prorl_envs.env.node import Node
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.types import ModelClient, Renderer
from prorl_envs.rollout.agent import Agent
from prorl_envs.rollout.batches import Batches
from prorl_envs.rollout.defaults import Defaults
from prorl_envs.rollout.engine import Engine
from prorl_envs.rollout.episode_types import EpisodeRequest, EpisodeView
from prorl_envs.rollout.episodes import Episodes
from prorl_envs.rollout.errors import Conflict, NotFound, Unavailable
from prorl_envs.rollout.fair_queue import COMMON, Share
from prorl_envs.rollout.group_views import group_view, job_view
from prorl_envs.rollout.leases import Leases
from prorl_envs.rollout.metrics import Metrics
from prorl_envs.rollout.model_views import ModelServers, router_view
from prorl_envs.rollout.news import EVERYTHING, News
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.offer import Offer
from prorl_envs.rollout.placement import Limits
from prorl_envs.rollout.restart import sort_out
from prorl_envs.rollout.room import Quota, Room
from prorl_envs.rollout.sandbox_memory import SandboxMemory
from prorl_envs.rollout.scheduler import Pause, Scheduler
from prorl_envs.rollout.stages import Family
from prorl_envs.rollout.steering import Steering
from prorl_envs.rollout.store import ALL, MemoryStore, NewGroup, Selection, Store, StoredGroup
from prorl_envs.rollout.types import (
    GroupRequest,
    JobState,
    Result,
    Stage,
    job_id,
    split_job_id,
)
from prorl_envs.rollout.views import (
    GroupView,
    JobView,
    PoolView,
    ResultPage,
    StatusView,
)
from prorl_envs.rollout.watch import Watch
from prorl_envs.rollout.worker import Worker

log = logging.getLogger(__name__)


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class RolloutService:
    """One machine's rollout service. Start it, use it from the same event loop, stop it.

    Args:
        node: this machine's sandboxes. The service closes each sandbox it starts, not the node.
        environments: environment classes by name.
        renderer: the model's tokenizer and chat template.
        model: the model servers. The service does not close it.
        settings: pool sizes and bounds.
        store: where groups and results are kept; None keeps them in memory.
        clock: measures deadlines and timings.
        defaults: by environment, the limits and the sampling of a request that names none.
        fleet: further machines that carry jobs out, or None. The service does not close it.
    """

    def __init__(
        self,
        node: Node,
        environments: Mapping[str, Family],
        renderer: Renderer,
        model: ModelClient,
        settings: ServiceSettings | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
        defaults: Mapping[str, Defaults] | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        #: Further machines, or None.
        self.fleet = fleet
        self.settings = settings or ServiceSettings()
        self.clock = clock or SystemClock()
        #: The environments.
        self.offer = Offer(environments, defaults)
        self.renderer = renderer
        self.model = model
        self.store: Store = store or _memory_store(self.settings)
        #: Its model servers, as callers steer them.
        self.model_servers = ModelServers(model, self.store)
        self.state = ServiceState.STARTING
        agent = Agent(renderer, model, self.clock, self.settings.reasoning)
        worker = Worker(
            node,
            environments,
            agent,
            self.clock,
            grace_s=self.settings.grace_s,
            close_s=self.settings.close_s,
        )
        scheduler = Scheduler(Limits.of_settings(self.settings), here=fleet is None or fleet.head_takes_jobs)
        self._engine = Engine(
            scheduler, fleet or worker, self.store, self.clock, self._recorded, lambda: self.batches.freed()
        )
        if fleet is not None:
            fleet.attach(worker, self._engine)
        self.episodes = Episodes(
            worker,
            agent,
            self._engine,
            self.clock,
            most=self.settings.episodes,
            idle_s=self.settings.episode_idle_s,
        )
        #: What a dashboard shows, and what it may change.
        self._memory = SandboxMemory(self.clock, node.memory)
        self.steering = Steering(self, self._engine, lambda: node.use, self._memory.look)
        self.watch = Watch(self.clock, self.store, self.steering.now, self.settings.keep_results)
        #: What `/metrics` shows.
        self.metrics = Metrics(self.status, lambda: node.use, lambda: self.batches.views(), fleet)
        #: What may still be accepted.
        self.room = Room(lambda: self.settings.queue, self._engine, self.episodes, self.store)
        self._submitting = asyncio.Lock()
        self.batches: Batches = Batches(
            self, self.store, self.settings, self.clock, self._submitting, self.metrics.decided
        )
        #: Of groups and batches that somebody has to follow.
        self.leases: Leases = Leases(
            self.clock, {"groups": self.cancel_group, "batches": self.batches.cancel}
        )
        self._stopping = False
        self._newest = 0
        self._news = News()
        self._started_at = self.clock.monotonic()

    # Life.

    async def start(self) -> None:
        """Go on with what the store knows to be unfinished, each as a further attempt, and begin to serve.
        What cannot go on fails, and holds up nothing else."""
        self._newest = await self.store.newest()
        await self.model_servers.restore()
        unfinished = await self.store.unfinished()
        await self.batches.restore()  # before anything comes of their groups
        for group in unfinished:
            left = sort_out(group, self.offer.load)
            for result in left.given_up:
                self._engine.give_up(result)
            if left.task is not None:
                share = self.batches.share(group.batch_id)
                self._engine.readmit(group, left.task, left.samples, share=share)
                self.leases.grant("groups", group.request.id, group.request.lease_s)
        self.state = ServiceState.SERVING  # only now: what is submitted is unfinished too
        self.batches.start()
        self.leases.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """End. Nothing is accepted from here on; readers still read. Idempotent.

        Args:
            drain_s: seconds to let accepted jobs finish. What is left then is cancelled, or where the store
                is durable left to the next start; every sandbox is closed before this returns.
        """
        if self.state is ServiceState.STOPPED:
            return
        self._stopping = True
        async with self._submitting:  # what is being accepted is admitted first
            self.state = ServiceState.DRAINING
        try:
            await self.batches.aclose()
            await self.leases.aclose()
            async with self.clock.timeout(drain_s):
                await self._engine.settled()
        except TimeoutError:
            log.info("stopping: %d unfinished jobs are ended", len(self._engine.scheduler))
        finally:  # also when the drain itself is interrupted
            self._engine.cancel_all()
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self.batches.aclose()  # where it was interrupted
        await self.leases.aclose()
        try:
            async with self.clock.timeout(2 * self.settings.close_s):  # an interrupt, then a close
                await self.episodes.aclose()
                await self._engine.settled()
        except TimeoutError:
            log.error("%d jobs do not end; their sandboxes end with the node", len(self._engine.scheduler))
        self.state = ServiceState.STOPPED
        await self.watch.aclose()
        await self._memory.aclose()
        self._news.tell()

    # How it is operated.

    def check_started(self) -> None:
        """Raises:
        Unavailable: the store is still being read, so nothing is known of what was accepted before.
        """
        if self.state is ServiceState.STARTING:
            raise Unavailable(f"the service is {self.state}", hint="ask again soon", retry_after_s=1.0)

    def check_open(self) -> None:
        """Raises:
        Unavailable: nothing new is taken now.
        """
        self.check_started()
        if self.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {self.state}", hint="submit to another, or later")

    def pause(self, mode: Pause) -> None:
        """Go on accepting, and start less, until `resume`. A service that starts again is not paused.

        Args:
            mode: what is held back.
        """
        log.warning("paused: %s", mode)
        self._engine.pause(mode)

    async def drain(self, wait_s: float = 0.0) -> None:
        """Take nothing more, and finish what is there, until `resume`. Idempotent.

        Args:
            wait_s: seconds to wait until everything is finished and closed.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        async with self._submitting:  # what is being accepted is admitted first
            self._check_operable()
            if self.state is ServiceState.SERVING:
                log.warning("draining")
                self.state = ServiceState.DRAINING
        with contextlib.suppress(TimeoutError):  # the caller looks at the status
            async with self.clock.timeout(wait_s):
                await self._engine.settled()

    def resume(self) -> None:
        """End a pause or a drain.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        self._check_operable()
        log.warning("resumed")
        self.state = ServiceState.SERVING
        self._engine.resume()
        self.batches.freed()

    def _check_operable(self) -> None:
        self.check_started()
        if self._stopping:
            raise Unavailable(f"the service is {self.state}")

    # What callers ask for.

    async def submit(
        self, requests: Sequence[GroupRequest], *, quota: Quota | None = None
    ) -> list[GroupView]:
        """Accept groups, all or none. The same request under the same id is the same submission.

        Args:
            requests: what is asked for.
            quota: most unfinished jobs, and open episodes, whose id begins so.

        Raises:
            InputError: an environment is not known, or a task row is wrong.
            Conflict: an id is taken by another request.
            Full: the queue, or the quota, has no room for all of them.
            Unavailable: the service is not serving.
        """
        tasks = [self.offer.load(request) for request in requests]
        groups = [NewGroup(request, task.id) for request, task in zip(requests, tasks, strict=True)]
        # A caller who goes away must not leave a group that is stored and never begun. The task begins at
        # once: where the loop is busy, each of its rounds takes long.
        accepting = asyncio.Task(
            self.accept(groups, tasks, quota=quota), loop=asyncio.get_running_loop(), eager_start=True
        )
        fresh = await asyncio.shield(accepting)
        return [
            group_view(_begun(group), self._engine) if new else await self.group(group.request.id)
            for group, new in zip(groups, fresh, strict=True)
        ]

    async def accept(
        self,
        groups: Sequence[NewGroup],
        tasks: Sequence[Task],
        *,
        quota: Quota | None = None,
        share: Share = COMMON,
        kept: Callable[[], None] = lambda: None,
    ) -> list[bool]:
        """Keep groups, all or none, and begin those that are new.

        Args:
            tasks: of the groups.
            quota: as of `submit`.
            share: whose they are.
            kept: called when they are kept, before anything comes of them.

        Returns:
            of each, whether it is new.

        Raises:
            Conflict, Full, Unavailable.
        """
        groups = [replace(group, request=self.offer.settled(group.request)) for group in groups]
        async with self._submitting:
            self.check_open()
            for group in groups:
                if group.batch_id is None and self.batches.owns(group.request.id):
                    raise Conflict(f"{group.request.id!r} is the id of a batch's group", hint="use another")
            begun_by = groups[0].batch_id if groups else None
            quota = quota or (self.room.quota_of(begun_by) if begun_by else None)
            await self.room.check([group.request for group in groups], quota)
            fresh = await self.store.submit(groups)
            kept()
            for group, task, new in zip(groups, tasks, fresh, strict=True):
                if new:
                    self._engine.admit(group.request, task, batch_id=group.batch_id, share=share)
                    self.leases.grant("groups", group.request.id, group.request.lease_s)
        return fresh

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        """Where a group is.

        Args:
            group_id: the caller's.
            wait_s: seconds to wait until it is complete.

        Raises:
            NotFound.
        """

        async def look() -> tuple[GroupView, bool]:
            view = group_view(await self.store.group(group_id), self._engine)
            return view, view.complete

        return await self._watch(look, group_id, wait_s)

    async def job(self, job: str, *, wait_s: float = 0.0) -> JobView:
        """Where a job is.

        Args:
            job: its id.
            wait_s: seconds to wait until it is finished.

        Raises:
            NotFound.
        """
        group_id, sample = split_job_id(job)

        async def look() -> tuple[JobView, bool]:
            group = await self.store.group(group_id) if group_id else None
            if group is None or sample >= group.request.samples:
                raise NotFound(f"no job {job!r}", hint="job ids are <group id>/<index>")
            view = job_view(group, sample, self._engine)
            return view, view.state.final

        return await self._watch(look, group_id, wait_s)

    async def cancel_job(self, job: str) -> JobView:
        """End a job wherever it is. Returns once its result is recorded; its sandbox is closed after that.

        Raises:
            NotFound.
        """
        await self.job(job)
        await self._engine.cancel([job])
        return await self.job(job)

    async def cancel_jobs(self, jobs: Iterable[str]) -> None:
        """End those of these jobs that have not ended; return once their results are recorded."""
        await self._engine.cancel(jobs)

    async def cancel_group(self, group_id: str) -> GroupView:
        """End what is left of a group.

        Raises:
            NotFound.
        """
        group = await self.store.group(group_id)
        await self._engine.cancel([job_id(group_id, sample) for sample in range(group.request.samples)])
        return await self.group(group_id)

    async def results(
        self, after: int, *, limit: int, wait_s: float = 0.0, only: Selection = ALL
    ) -> ResultPage:
        """Results after a cursor.

        Args:
            after: a cursor; 0 begins with the oldest result kept.
            limit: most results.
            wait_s: seconds to wait for the first one if there is none.
            only: which results; `next` passes over the others.

        Raises:
            CursorExpired: results in between are no longer kept.
        """

        async def look() -> tuple[ResultPage, bool]:
            nonlocal after
            # Asked before the results are: all of them up to here are seen by then.
            newest = await self.store.newest() if only != ALL else 0
            found = await self.store.results(after, limit, only=only)
            after = found[-1].cursor if found else max(after, newest)
            return ResultPage(results=found, next=after), bool(found)

        return await self._watch(look, EVERYTHING, wait_s)

    async def _watch[V](self, look: Callable[[], Awaitable[tuple[V, bool]]], topic: str, wait_s: float) -> V:
        """Look at each news of a topic, until what is seen is what was waited for, or the time is up."""
        news = self._news.listen(topic)
        seen, done = await look()
        if done or wait_s <= 0:
            return seen
        with contextlib.suppress(TimeoutError):  # the last look says how far it is
            async with self.clock.timeout(wait_s):
                while not done and self.state is not ServiceState.STOPPED:
                    await news.wait()
                    news = self._news.listen(topic)
                    seen, done = await look()
        return seen

    async def start_episode(
        self, request: EpisodeRequest, *, wait_s: float, quota: Quota | None = None
    ) -> EpisodeView:
        """Begin an episode that the caller drives, or look at it where it is known.

        Args:
            request: what is asked for.
            wait_s: seconds to wait until it is ready.
            quota: as of `submit`.

        Raises:
            InputError: the environment is not known, or the task row is wrong.
            Conflict: the id is taken by another request.
            Full: there are as many as there may be.
            Unavailable: the service is not serving.
        """
        task = self.offer.load(request)
        self.check_open()
        self.room.check_episode(request.id, quota)
        return await self.episodes.start(request, task, wait_s=wait_s)

    def status(self) -> StatusView:
        """Pools, queues and counts, now."""
        engine, scheduler = self._engine, self._engine.scheduler
        active, waiting = scheduler.active, scheduler.waiting
        return StatusView(
            version=__version__,
            state=self.state,
            paused=scheduler.paused,
            uptime_s=self.clock.monotonic() - self._started_at,
            pools={
                stage.value: PoolView(
                    limit=scheduler.limit(stage), active=active[stage], waiting=waiting[stage]
                )
                for stage in Stage
            },
            live=scheduler.live,
            live_limit=scheduler.live_limit,
            episodes=len(self.episodes),
            unfinished=len(scheduler),
            queue_limit=self.settings.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors + self.episodes.internal_errors,
            newest=self._newest,
            model_servers=self.model_servers.all().servers,
            router=router_view(self.model) if isinstance(self.model, ModelPool) else None,
        )

    def has_model(self) -> bool:
        """Whether anything samples: the model is fixed, or a server of the pool takes turns."""
        servers = self.model_servers.all().servers
        return not isinstance(self.model, ModelPool) or any(not server.draining for server in servers)

    def _recorded(self, result: Result) -> None:
        """A result is kept; told in the order of the cursors."""
        self._newest = max(self._newest, result.cursor)
        self.metrics.observe(result)
        self.watch.observe(result)
        self.batches.ended(result)
        self._announce(result)

    def _announce(self, result: Result) -> None:
        """Wake everyone who waits for a result."""
        self._news.tell(EVERYTHING, result.group_id)


def _begun(group: NewGroup) -> StoredGroup:
    """A group that has just been accepted, as the store has it."""
    nothing = (0,) * group.request.samples
    return StoredGroup(group.request, group.task_id, (None,) * len(nothing), nothing, nothing)


def _memory_store(settings: ServiceSettings) -> MemoryStore:
    return MemoryStore(
        max_results=settings.keep_results, max_tokens=settings.keep_tokens, max_age_s=settings.keep_s
    )
