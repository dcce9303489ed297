"""Rollout service: creates, connects, starts and stops its parts. The HTTP routes call the parts."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.config import ServiceSettings
from prorl_envs.env.audit.record import AuditRecord
from prorl_envs.env.node import Node
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import ModelClient
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.api.dashboard import LimitsRequest
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeView
from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.api.views import Pause, PoolView, StatusView
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.environments import Defaults, EnvironmentRegistry
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.monitoring.dashboard_state import DashboardState, SandboxMemory, sandboxes_view
from prorl_envs.rollout.monitoring.metrics import Metrics, ScrapeCollector
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.scheduling.scheduler import Scheduler
from prorl_envs.rollout.service.batches import Batches
from prorl_envs.rollout.service.groups import Groups, Quota
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.leases import Leases
from prorl_envs.rollout.service.live_jobs import LiveJobs
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.read_tracker import ReadTracker
from prorl_envs.rollout.service.recovery import plan_recovery
from prorl_envs.rollout.service.result_feed import Notifier, ResultFeed
from prorl_envs.rollout.service.state import ServiceState, StateGuard
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import MemoryStore

log = logging.getLogger(__name__)

#: Number of running jobs that the dashboard shows.
SHOWN_JOBS = 50


class RolloutService:
    """Rollout service: accepts groups, runs their jobs through the stages, and stores the results.

    The service must be started, used and stopped in one event loop.

    Args:
        node: starts this machine's sandboxes. The service closes its sandboxes, but not the node.
        environments: environment classes by name.
        renderer: the model's tokenizer and chat template.
        model: client of the model servers. The service does not close it.
        settings: pool sizes and limits.
        store: stores groups and results; None keeps them in memory.
        clock: measures deadlines and timings.
        defaults: limits and sampling for requests that set none, by environment.
        fleet: further nodes that run jobs, or None. The service does not close it.

    Attributes:
        guard: state of the service.
        groups: groups and their jobs, with environments, quotas and leases.
        feed: stored results, in the order of their cursors.
        batches: batches of informative groups.
        episodes: episodes that a caller drives step by step.
        model_servers: operations of callers on the model servers.
        live_jobs, dashboard, metrics: views of the running service.
        connections: counts of the HTTP server's connections.
    """

    def __init__(
        self,
        node: Node,
        environments: Mapping[str, Family],
        renderer: TemplateRenderer,
        model: ModelClient,
        settings: ServiceSettings | None = None,
        store: SqlStore | None = None,
        clock: Clock | None = None,
        defaults: Mapping[str, Defaults] | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.renderer, self.model, self.fleet = renderer, model, fleet
        self.settings = settings = settings or ServiceSettings()
        self._clock = clock = clock or SystemClock()
        self.store = store = store or MemoryStore(**settings.retention.of_results)
        self.guard, self._notifier, leases = StateGuard(), Notifier(clock), Leases(clock)
        self.model_servers = ModelServers(model, store, clock)
        self.feed = ResultFeed(store, ReadTracker(store, settings.retention, clock), self._notifier)

        agent = Agent(renderer, model, clock, settings.reasoning)
        worker = Worker(node, environments, agent, clock, grace_s=settings.grace_s, close_s=settings.close_s)
        limits, takes_jobs = StageLimits.of_settings(settings), fleet is None or fleet.head_takes_jobs
        scheduler = Scheduler(limits, here=takes_jobs, max_sandboxes=node.max_sandboxes)
        if takes_jobs and limits.max_jobs_with_sandbox > node.max_sandboxes:
            log.warning("this process's limits allow %d sandboxes; further jobs wait", node.max_sandboxes)
        self._engine = engine = Engine(scheduler, fleet or worker, store, clock, self.feed.recorded)
        if fleet is not None:
            fleet.attach(worker, engine)

        self.episodes = InteractiveEpisodes(
            fleet or worker, agent, engine, clock, max_open=settings.episodes, idle_s=settings.episode_idle_s
        )
        record = None
        if settings.require_audit is not None:
            record = AuditRecord(settings.require_audit, node.dockerfiles().puller.settings.bases)
        registry = EnvironmentRegistry(environments, defaults, record)
        self.groups = Groups(
            self.guard, registry, settings.queue, self.episodes, store, engine, leases, self._notifier
        )
        self.batches = Batches(self.groups, settings, clock)

        self._node, self._memory = node, SandboxMemory(clock, node.memory)
        self._created_at = clock.monotonic()
        self.live_jobs = LiveJobs(engine, self._memory.look, clock)
        self.dashboard = DashboardState(clock, store, self._dashboard_fields)
        self.connections = ConnectionCounts()
        self.metrics = Metrics(
            ScrapeCollector(
                self.status,
                lambda: node.use,
                self.batches.views,
                lambda: store.unread,
                fleet,
                self.connections,
            )
        )

        self.groups.reserve(self.batches.owns)
        engine.on_free = self.batches.freed
        self.batches.on_decision = self.metrics.decided
        self.feed.subscribe(self.metrics.observe, self.dashboard.observe, self.batches.ended)

    async def start(self) -> None:
        """Resume the unfinished jobs of the store, each with a new attempt, and start to serve. Jobs that
        cannot continue fail, without an effect on other jobs."""
        await self.dashboard.load()
        self.feed.newest = await self.store.newest()
        await self.model_servers.restore()
        unfinished = await self.store.unfinished()
        await self.batches.restore()  # before the groups of batches produce results
        leases = self.groups.leases
        for group in unfinished:
            recovery = plan_recovery(group, self.groups.environments.load)
            for job in recovery.given_up:
                self._engine.give_up(job)
            if recovery.task is not None:
                share = self.batches.share(group.batch_id)
                self._engine.readmit(group, recovery.task, recovery.samples, share=share)
                leases.grant("groups", group.request.id, group.request.lease_s)
        # Only now: a group that was submitted during recovery would be among the unfinished groups as well.
        self.guard.state = ServiceState.SERVING
        self.batches.start()
        leases.start({"groups": self.groups.cancel, "batches": self.batches.cancel})

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop the service. It accepts no more work; results can still be read. Idempotent.

        Args:
            drain_s: seconds for accepted jobs to finish. Remaining jobs are then cancelled; with a durable
                store they are kept for the next start instead. Every sandbox is closed before this returns.
        """
        if self.guard.state is ServiceState.STOPPED:
            return
        self.guard.stopping = True
        async with self.guard.lock:  # groups that are being accepted are admitted first
            self.guard.state = ServiceState.DRAINING
        try:
            await self._stop_batches()
            async with self._clock.timeout(drain_s):
                await self._engine.settled()
        except TimeoutError:
            log.info("stopping %d unfinished jobs", len(self._engine.scheduler))
        finally:  # also if the drain is cancelled
            self._engine.cancel_all()
            await asyncio.shield(self._close())

    def pause(self, mode: Pause) -> None:
        """Accept groups, but start no stages until `resume`. A restarted service is not paused.

        Args:
            mode: which stages do not start.
        """
        log.warning("paused: %s", mode)
        self._engine.apply(self._engine.scheduler.pause(mode))

    async def drain(self, wait_s: float = 0.0) -> None:
        """Accept no more work until `resume`, and finish the accepted jobs. Idempotent.

        Args:
            wait_s: maximum seconds to wait until all jobs are finished and their sandboxes are closed.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        async with self.guard.lock:  # groups that are being accepted are admitted first
            self.guard.check_operable()
            if self.guard.state is ServiceState.SERVING:
                log.warning("draining")
                self.guard.state = ServiceState.DRAINING
        with contextlib.suppress(TimeoutError):  # the caller sees from the status whether jobs remain
            async with self._clock.timeout(wait_s):
                await self._engine.settled()

    def resume(self) -> None:
        """End a pause or a drain.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        self.guard.check_operable()
        log.warning("resumed")
        self.guard.state = ServiceState.SERVING
        self._engine.apply(self._engine.scheduler.resume())
        self.batches.freed()

    def resize(self, request: LimitsRequest) -> None:
        """Change the concurrency limits until the service stops. Work above a lowered limit continues."""
        changes = request.model_dump(exclude_none=True)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in changes.items()))
        self.settings = ServiceSettings.model_validate({**self.settings.model_dump(), **changes})
        self.groups.queue = self.settings.queue
        limits = StageLimits.of_settings(self.settings)
        self._engine.apply(self._engine.scheduler.resize(limits))

    async def start_episode(
        self, request: EpisodeRequest, *, wait_s: float, quota: Quota | None = None
    ) -> EpisodeView:
        """Start an interactive episode, or return the state of a known one.

        Args:
            request: the episode request.
            wait_s: maximum seconds to wait until the episode is ready.
            quota: see `Groups.submit`.

        Raises:
            InputError: the environment is not known, or the task row is wrong.
            Conflict: the id is taken by another request.
            QueueFull: the maximum number of episodes is open, or the quota is used up.
            Unavailable: the service is not serving.
        """
        task = self.groups.environments.load(request)
        self.guard.check_open()
        self.groups.check_episode(request.id, quota)
        return await self.episodes.start(request, task, wait_s=wait_s)

    def status(self) -> StatusView:
        """Return pools, queues, counts and model servers."""
        engine, scheduler = self._engine, self._engine.scheduler
        active, waiting = scheduler.active, scheduler.waiting
        return StatusView(
            version=__version__,
            state=self.guard.state,
            paused=scheduler.paused,
            uptime_s=self._clock.monotonic() - self._created_at,
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
            queue_limit=self.groups.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors + self.episodes.internal_errors,
            newest_cursor=self.feed.newest,
            model_servers=self.model_servers.all().servers,
            router=self.model_servers.router(),
        )

    def _dashboard_fields(self) -> dict[str, Any]:
        """Return the fields of a `DashboardView` that are not about results."""
        return {
            "status": self.status(),
            "attempts_limit": self._engine.scheduler.attempts,
            "sandboxes": sandboxes_view(self._node.use, self._memory.look()),
            "batches": self.batches.views(),
            "nodes": self.fleet.views() if self.fleet is not None else [],
            "running": self.live_jobs.running(SHOWN_JOBS),
        }

    async def _stop_batches(self) -> None:
        await self.batches.aclose()
        await self.groups.leases.aclose()

    async def _close(self) -> None:
        await self._stop_batches()  # again, since a cancellation may have interrupted the first call
        try:
            # Twice: to interrupt a stage, then to close.
            async with self._clock.timeout(2 * self.settings.close_s):
                await self.episodes.aclose()
                await self._engine.settled()
        except TimeoutError:
            unfinished = len(self._engine.scheduler)
            log.error("%d jobs do not stop; closing the node will stop their sandboxes", unfinished)
        self.guard.state = ServiceState.STOPPED
        for part in (self._memory, self._notifier):
            await part.aclose()
