"""Rollout service: interface for callers. `build.py` composes it."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorl_envs import __version__
from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.model.types import ModelClient, Renderer
from prorl_envs.rollout.api.dashboard import LimitsRequest
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeView
from prorl_envs.rollout.api.types import ALL, GroupRequest, JobState, Selection, Stage
from prorl_envs.rollout.api.views import GroupView, JobView, Pause, PoolView, ResultPage, StatusView
from prorl_envs.rollout.monitoring.dashboard_state import DashboardState
from prorl_envs.rollout.monitoring.metrics import Metrics
from prorl_envs.rollout.monitoring.sandbox_memory import SandboxMemory
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.admission import Quota
from prorl_envs.rollout.service.batches import Batches
from prorl_envs.rollout.service.gate import ServiceGate, ServiceState
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.live_jobs import LiveJobs
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.recovery import plan_recovery
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.store.sqlite import SqlStore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class RolloutService:
    """Rollout service: accepts groups, runs their jobs through the stages, and stores the results.

    The service must be started, used and stopped in one event loop.

    Attributes:
        settings: the settings that the service was built with, with the limits of `resize`.
        renderer: the model's tokenizer and chat template.
        model: client of the model servers; the service does not close it.
        store: stores groups and results.
        gate: state of the service.
        groups: groups and their jobs, with environments, quotas and leases.
        feed: stream of results.
        batches: batches of informative groups.
        episodes: episodes that a caller drives step by step.
        model_servers: operations of callers on the model servers.
        fleet: further nodes that run jobs, or None.
        live_jobs, dashboard, metrics: views of the running service.
        memory: memory use of the sandboxes.
        connections: counts of the HTTP server's connections.
        clock: measures the time since the service was built.
    """

    settings: ServiceSettings
    renderer: Renderer
    model: ModelClient
    store: SqlStore
    gate: ServiceGate
    groups: Groups
    feed: ResultFeed
    batches: Batches
    episodes: InteractiveEpisodes
    model_servers: ModelServers
    fleet: Fleet | None
    live_jobs: LiveJobs
    memory: SandboxMemory
    dashboard: DashboardState
    metrics: Metrics
    connections: ConnectionCounts
    clock: Clock
    _created_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._created_at = self.clock.monotonic()

    @property
    def state(self) -> ServiceState:
        return self.gate.state

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
            for result in recovery.given_up:
                self.groups.engine.give_up(result)
            if recovery.task is not None:
                share = self.batches.share(group.batch_id)
                self.groups.engine.readmit(group, recovery.task, recovery.samples, share=share)
                leases.grant("groups", group.request.id, group.request.lease_s)
        # Only now: a group that was submitted during recovery would be among the unfinished groups as well.
        self.gate.state = ServiceState.SERVING
        self.batches.start()
        leases.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop the service. It accepts no more work; results can still be read. Idempotent.

        Args:
            drain_s: seconds for accepted jobs to finish. Remaining jobs are then cancelled; with a durable
                store they are kept for the next start instead. Every sandbox is closed before this returns.
        """
        if self.gate.state is ServiceState.STOPPED:
            return
        self.gate.stopping = True
        async with self.gate.lock:  # groups that are being accepted are admitted first
            self.gate.state = ServiceState.DRAINING
        try:
            await self._stop_batches()
            async with self.clock.timeout(drain_s):
                await self.groups.engine.settled()
        except TimeoutError:
            log.info("stopping %d unfinished jobs", len(self.groups.engine.scheduler))
        finally:  # also if the drain is cancelled
            self.groups.engine.cancel_all()
            await asyncio.shield(self._close())

    def pause(self, mode: Pause) -> None:
        """Accept groups, but start no stages until `resume`. A restarted service is not paused.

        Args:
            mode: which stages do not start.
        """
        log.warning("paused: %s", mode)
        self.groups.engine.pause(mode)

    async def drain(self, wait_s: float = 0.0) -> None:
        """Accept no more work until `resume`, and finish the accepted jobs. Idempotent.

        Args:
            wait_s: maximum seconds to wait until all jobs are finished and their sandboxes are closed.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        async with self.gate.lock:  # groups that are being accepted are admitted first
            self.gate.check_operable()
            if self.gate.state is ServiceState.SERVING:
                log.warning("draining")
                self.gate.state = ServiceState.DRAINING
        with contextlib.suppress(TimeoutError):  # the caller sees from the status whether jobs remain
            async with self.clock.timeout(wait_s):
                await self.groups.engine.settled()

    def resume(self) -> None:
        """End a pause or a drain.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        self.gate.check_operable()
        log.warning("resumed")
        self.gate.state = ServiceState.SERVING
        self.groups.engine.resume()
        self.batches.freed()

    def resize(self, request: LimitsRequest) -> None:
        """Change the concurrency limits until the service stops. Work above a lowered limit continues."""
        changes = request.model_dump(exclude_none=True)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in changes.items()))
        self.settings = ServiceSettings.model_validate({**self.settings.model_dump(), **changes})
        self.groups.admission.queue = self.settings.queue
        self.groups.engine.resize(StageLimits.of_settings(self.settings))

    def status(self) -> StatusView:
        """Return pools, queues and counts."""
        engine = self.groups.engine
        scheduler = engine.scheduler
        active, waiting = scheduler.active, scheduler.waiting
        return StatusView(
            version=__version__,
            state=self.gate.state,
            paused=scheduler.paused,
            uptime_s=self.clock.monotonic() - self._created_at,
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
            queue_limit=self.groups.admission.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors + self.episodes.internal_errors,
            newest_cursor=self.feed.newest,
            model_servers=self.model_servers.all().servers,
            router=self.model_servers.router(),
        )

    async def submit(
        self, requests: Sequence[GroupRequest], *, quota: Quota | None = None
    ) -> list[GroupView]:
        return await self.groups.submit(requests, quota=quota)

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        return await self.groups.group(group_id, wait_s=wait_s)

    async def job(self, job: str, *, wait_s: float = 0.0) -> JobView:
        return await self.groups.job(job, wait_s=wait_s)

    async def cancel_job(self, job: str) -> JobView:
        return await self.groups.cancel_job(job)

    async def cancel_group(self, group_id: str) -> GroupView:
        return await self.groups.cancel(group_id)

    async def results(
        self,
        after: int,
        *,
        limit: int,
        wait_s: float = 0.0,
        only: Selection = ALL,
        acknowledge: bool = True,
    ) -> ResultPage:
        return await self.feed.page(after, limit=limit, wait_s=wait_s, only=only, acknowledge=acknowledge)

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
        self.gate.check_open()
        self.groups.admission.check_episode(request.id, quota)
        return await self.episodes.start(request, task, wait_s=wait_s)

    async def _stop_batches(self) -> None:
        await self.batches.aclose()
        await self.groups.leases.aclose()

    async def _close(self) -> None:
        await self._stop_batches()  # again, since a cancellation may have interrupted the first call
        try:
            async with self.clock.timeout(2 * self.settings.close_s):  # to interrupt a stage, then to close
                await self.episodes.aclose()
                await self.groups.engine.settled()
        except TimeoutError:
            log.error(
                "%d jobs do not stop; closing the node will stop their sandboxes",
                len(self.groups.engine.scheduler),
            )
        self.gate.state = ServiceState.STOPPED
        await self.dashboard.aclose()
        await self.memory.aclose()
        await self.groups.notifier.aclose()
