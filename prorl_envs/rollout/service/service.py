"""The rollout service: accepts groups, runs their jobs through the stages, stores the results.

The scheduler decides, the worker carries out, the engine connects the two, and the store keeps results.
`RolloutService` is the interface for callers.
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
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.types import ModelClient, Renderer, ServerHealth
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.api.errors import Conflict, NotFound, Unavailable
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeView
from prorl_envs.rollout.api.types import (
    ALL,
    GroupRequest,
    JobState,
    Result,
    Selection,
    Stage,
    job_id,
    split_job_id,
)
from prorl_envs.rollout.api.views import (
    GroupView,
    JobView,
    Pause,
    PoolView,
    ResultPage,
    StatusView,
)
from prorl_envs.rollout.batches.leases import Leases
from prorl_envs.rollout.batches.manager import Batches
from prorl_envs.rollout.episode.defaults import Defaults
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.environments import EnvironmentRegistry
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.monitoring.dashboard_state import DashboardState
from prorl_envs.rollout.monitoring.metrics import Metrics
from prorl_envs.rollout.monitoring.sandbox_memory import SandboxMemory
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.scheduling.fair_queue import COMMON, Share
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.scheduling.scheduler import Scheduler
from prorl_envs.rollout.service.admission import AdmissionControl, Quota
from prorl_envs.rollout.service.group_views import group_view, job_view
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.model_servers import ModelServers, router_view
from prorl_envs.rollout.service.notifier import EVERYTHING, Notifier
from prorl_envs.rollout.service.operations import Operations
from prorl_envs.rollout.service.read_tracker import ReadTracker
from prorl_envs.rollout.service.recovery import sort_out
from prorl_envs.rollout.store.base import NewGroup, Store, StoredGroup
from prorl_envs.rollout.store.sqlite import MemoryStore

log = logging.getLogger(__name__)


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class RolloutService:
    """Rollout service of one machine. Start it, use it from the same event loop, stop it.

    Args:
        node: this machine's sandboxes. The service closes each sandbox it starts, not the node.
        environments: environment classes by name.
        renderer: the model's tokenizer and chat template.
        model: the model servers. The service does not close it.
        settings: pool sizes and bounds.
        store: keeps groups and results; None keeps them in memory.
        clock: measures deadlines and timings.
        defaults: by environment, the limits and the sampling of a request that sets none.
        fleet: further nodes that run jobs, or None. The service does not close it.
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
        #: Further nodes, or None.
        self.fleet = fleet
        self.settings = settings or ServiceSettings()
        self.clock = clock or SystemClock()
        #: The environments.
        self.offer = EnvironmentRegistry(environments, defaults)
        self.renderer = renderer
        self.model = model
        self.store: Store = store or MemoryStore(**self.settings.retention.of_results)
        #: Results that were read.
        self.readers = ReadTracker(self.store, self.settings.retention, self.clock)
        #: Operations of callers on the model servers.
        self.model_servers = ModelServers(model, self.store, self.clock)
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
        scheduler = Scheduler(
            StageLimits.of_settings(self.settings), here=fleet is None or fleet.head_takes_jobs
        )
        self._engine = Engine(
            scheduler, fleet or worker, self.store, self.clock, self._recorded, lambda: self.batches.freed()
        )
        if fleet is not None:
            fleet.attach(worker, self._engine)
        self.episodes = InteractiveEpisodes(
            worker,
            agent,
            self._engine,
            self.clock,
            most=self.settings.episodes,
            idle_s=self.settings.episode_idle_s,
        )
        #: State and operations of the dashboard.
        self._memory = SandboxMemory(self.clock, node.memory)
        self.steering = Operations(self, self._engine, lambda: node.use, self._memory.look)
        self.watch = DashboardState(
            self.clock, self.store, self.steering.now, self.settings.retention.max_results
        )
        #: Connection counts of the HTTP server, if there is one.
        self.connections = ConnectionCounts()
        #: Metrics of `/metrics`.
        self.metrics = Metrics(
            self.status,
            lambda: node.use,
            lambda: self.batches.views(),
            lambda: self.store.unread,
            fleet,
            self.connections,
        )
        #: Admission control.
        self.room = AdmissionControl(lambda: self.settings.queue, self._engine, self.episodes, self.store)
        self._submitting = asyncio.Lock()
        self.batches: Batches = Batches(
            self, self.store, self.settings, self.clock, self._submitting, self.metrics.decided
        )
        #: Leases of groups and batches.
        self.leases: Leases = Leases(
            self.clock, {"groups": self.cancel_group, "batches": self.batches.cancel}
        )
        self._stopping = False
        self._newest = 0
        self._news = Notifier()
        self._started_at = self.clock.monotonic()

    # Lifecycle.

    async def start(self) -> None:
        """Resume the unfinished jobs of the store, each as a further attempt, and start to serve. Jobs that
        cannot continue fail and do not block others."""
        self._newest = await self.store.newest()
        await self.model_servers.restore()
        unfinished = await self.store.unfinished()
        await self.batches.restore()  # before any result of their groups arrives
        for group in unfinished:
            left = sort_out(group, self.offer.load)
            for result in left.given_up:
                self._engine.give_up(result)
            if left.task is not None:
                share = self.batches.share(group.batch_id)
                self._engine.readmit(group, left.task, left.samples, share=share)
                self.leases.grant("groups", group.request.id, group.request.lease_s)
        self.state = ServiceState.SERVING  # only now: submitted groups are unfinished too
        self.batches.start()
        self.leases.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop. Accepts nothing from now on; results can still be read. Idempotent.

        Args:
            drain_s: seconds to let accepted jobs finish. Remaining jobs are then cancelled, or left for the
                next start if the store is durable; every sandbox is closed before this returns.
        """
        if self.state is ServiceState.STOPPED:
            return
        self._stopping = True
        async with self._submitting:  # groups that are being accepted are admitted first
            self.state = ServiceState.DRAINING
        try:
            await self.batches.aclose()
            await self.leases.aclose()
            async with self.clock.timeout(drain_s):
                await self._engine.settled()
        except TimeoutError:
            log.info("stopping: %d unfinished jobs are ended", len(self._engine.scheduler))
        finally:  # also if the drain itself is interrupted
            self._engine.cancel_all()
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self.batches.aclose()  # if it was interrupted above
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

    # Operation.

    def check_started(self) -> None:
        """Check that the service has read the store; before that, accepted groups are not known.

        Raises:
            Unavailable: it has not.
        """
        if self.state is ServiceState.STARTING:
            raise Unavailable(f"the service is {self.state}", hint="ask again soon", retry_after_s=1.0)

    def check_open(self) -> None:
        """Check that the service accepts new work.

        Raises:
            Unavailable: it does not.
        """
        self.check_started()
        if self.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {self.state}", hint="submit to another, or later")

    def pause(self, mode: Pause) -> None:
        """Keep accepting groups, but hold jobs back until `resume`. A restarted service is not paused.

        Args:
            mode: which stages are held back.
        """
        log.warning("paused: %s", mode)
        self._engine.pause(mode)

    async def drain(self, wait_s: float = 0.0) -> None:
        """Accept nothing more, and finish the accepted jobs, until `resume`. Idempotent.

        Args:
            wait_s: seconds to wait until everything is finished and closed.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        async with self._submitting:  # groups that are being accepted are admitted first
            self._check_operable()
            if self.state is ServiceState.SERVING:
                log.warning("draining")
                self.state = ServiceState.DRAINING
        with contextlib.suppress(TimeoutError):  # the caller reads the status
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

    # Requests of callers.

    async def submit(
        self, requests: Sequence[GroupRequest], *, quota: Quota | None = None
    ) -> list[GroupView]:
        """Accept groups, all or none. The same request under the same id is the same submission.

        Args:
            requests: the groups.
            quota: prefix of ids, and the maximum of unfinished jobs and open episodes with this prefix.

        Raises:
            InputError: an environment is not known, or a task row is wrong.
            Conflict: an id is taken by another request.
            QueueFull: the queue, or the quota, has no room for all of them.
            Unavailable: the service is not serving.
        """
        tasks = [self.offer.load(request) for request in requests]
        groups = [NewGroup(request, task.id) for request, task in zip(requests, tasks, strict=True)]
        # A caller that disconnects must not leave a group that is stored and never started. The task starts
        # eagerly, because each iteration of a busy event loop takes long.
        accepting = asyncio.Task(
            self.accept(groups, tasks, quota=quota), loop=asyncio.get_running_loop(), eager_start=True
        )
        fresh = await asyncio.shield(accepting)
        return [
            group_view(_accepted(group), self._engine) if new else await self.group(group.request.id)
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
        """Store groups, all or none, and start those that are new.

        Args:
            tasks: of the groups.
            quota: as of `submit`.
            share: scheduling share of their jobs.
            kept: called when they are stored, before any of their results.

        Returns:
            for each group, whether it is new.

        Raises:
            Conflict, QueueFull, Unavailable: as for `submit`.
        """
        groups = [replace(group, request=self.offer.settled(group.request)) for group in groups]
        async with self._submitting:
            self.check_open()
            for group in groups:
                if group.batch_id is None and self.batches.owns(group.request.id):
                    raise Conflict(f"{group.request.id!r} is the id of a batch's group", hint="use another")
            started_by = groups[0].batch_id if groups else None
            quota = quota or (self.room.quota_of(started_by) if started_by else None)
            await self.room.check([group.request for group in groups], quota)
            fresh = await self.store.submit(groups)
            kept()
            for group, task, new in zip(groups, tasks, fresh, strict=True):
                if new:
                    self._engine.admit(group.request, task, batch_id=group.batch_id, share=share)
                    self.leases.grant("groups", group.request.id, group.request.lease_s)
        return fresh

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        """Return the state of a group.

        Args:
            group_id: the caller's.
            wait_s: seconds to wait until it is complete.

        Raises:
            NotFound: no such group.
        """

        async def look() -> tuple[GroupView, bool]:
            view = group_view(await self.store.group(group_id), self._engine)
            return view, view.complete

        return await self._watch(look, group_id, wait_s)

    async def job(self, job: str, *, wait_s: float = 0.0) -> JobView:
        """Return the state of a job.

        Args:
            job: its id.
            wait_s: seconds to wait until it is finished.

        Raises:
            NotFound: no such job.
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
        """Cancel a job in any state. Returns once its result is recorded; its sandbox is closed after that.

        Raises:
            NotFound: no such job.
        """
        await self.job(job)
        await self._engine.cancel([job])
        return await self.job(job)

    async def cancel_jobs(self, jobs: Iterable[str]) -> None:
        """Cancel the unfinished jobs among these; return once their results are recorded."""
        await self._engine.cancel(jobs)

    async def cancel_group(self, group_id: str) -> GroupView:
        """Cancel the unfinished jobs of a group.

        Raises:
            NotFound: no such group.
        """
        group = await self.store.group(group_id)
        await self._engine.cancel([job_id(group_id, sample) for sample in range(group.request.samples)])
        return await self.group(group_id)

    async def results(
        self,
        after: int,
        *,
        limit: int,
        wait_s: float = 0.0,
        only: Selection = ALL,
        acknowledge: bool = True,
    ) -> ResultPage:
        """Return results after a cursor.

        Args:
            after: a cursor; 0 starts with the oldest stored result.
            limit: maximum number of results.
            wait_s: seconds to wait for the first result if there is none.
            only: which results; `next` skips the others.
            acknowledge: the reader has processed what it was sent up to `after`; it is read.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer stored.
        """
        start = after
        if acknowledge:
            self.readers.confirmed(only, after)

        async def look() -> tuple[ResultPage, bool]:
            nonlocal after
            # Read before the results, so that all results up to `newest` have been seen.
            newest = await self.store.newest() if only != ALL else 0
            found = await self.store.results(after, limit, only=only)
            after = found[-1].cursor if found else max(after, newest)
            return ResultPage(results=found, next=after), bool(found)

        page = await self._watch(look, EVERYTHING, wait_s)
        if acknowledge:
            self.readers.sent(only, start, page)
        return page

    async def read(self, result: Result) -> None:
        """Mark a result as read."""
        self.store.acknowledge([result.cursor])

    async def acknowledge(self, after: int, up_to: int, only: Selection = ALL) -> None:
        """Mark the stored results after `after`, up to and including `up_to`, as read."""
        self.store.acknowledge(await self.store.cursors(after, up_to, only))

    async def _watch[V](self, look: Callable[[], Awaitable[tuple[V, bool]]], topic: str, wait_s: float) -> V:
        """Call `look` at each change of a topic, until it is done or the time is up."""
        news = self._news.listen(topic)
        seen, done = await look()
        if done or wait_s <= 0:
            return seen
        with contextlib.suppress(TimeoutError):  # the last view is returned
            async with self.clock.timeout(wait_s):
                while not done and self.state is not ServiceState.STOPPED:
                    await news.wait()
                    news = self._news.listen(topic)
                    seen, done = await look()
        return seen

    async def start_episode(
        self, request: EpisodeRequest, *, wait_s: float, quota: Quota | None = None
    ) -> EpisodeView:
        """Start an interactive episode, or return the state of a known one.

        Args:
            request: the episode request.
            wait_s: seconds to wait until it is ready.
            quota: as of `submit`.

        Raises:
            InputError: the environment is not known, or the task row is wrong.
            Conflict: the id is taken by another request.
            QueueFull: the maximum number of episodes is open.
            Unavailable: the service is not serving.
        """
        task = self.offer.load(request)
        self.check_open()
        self.room.check_episode(request.id, quota)
        return await self.episodes.start(request, task, wait_s=wait_s)

    def status(self) -> StatusView:
        """Return the current pools, queues and counts."""
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
            jobs_with_sandbox=scheduler.jobs_with_sandbox,
            max_jobs_with_sandbox=scheduler.max_jobs_with_sandbox,
            episodes=len(self.episodes),
            unfinished=len(scheduler),
            queue_limit=self.settings.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors + self.episodes.internal_errors,
            newest_cursor=self._newest,
            model_servers=self.model_servers.all().servers,
            router=router_view(self.model) if isinstance(self.model, ModelPool) else None,
        )

    def has_model(self) -> bool:
        """Return whether turns can be sampled: the model is fixed, or a server of the pool takes turns."""
        servers = self.model_servers.all().servers
        return not isinstance(self.model, ModelPool) or any(
            server.state is not ServerHealth.DRAINING for server in servers
        )

    def _recorded(self, result: Result) -> None:
        """Process a stored result; called in the order of the cursors."""
        self._newest = max(self._newest, result.cursor)
        self.metrics.observe(result)
        self.watch.observe(result)
        self.batches.ended(result)
        self.readers.check()
        self._announce(result)

    def _announce(self, result: Result) -> None:
        """Notify all requests that wait for a result."""
        self._news.tell(EVERYTHING, result.group_id)


def _accepted(group: NewGroup) -> StoredGroup:
    """Return a newly accepted group as the store has it."""
    nothing = (0,) * group.request.samples
    return StoredGroup(group.request, group.task_id, (None,) * len(nothing), nothing, nothing)
