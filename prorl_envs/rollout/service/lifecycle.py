"""Lifecycle of a service: start, stop, and the operator's changes while the service runs."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.rollout.api.dashboard import LimitsRequest
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.monitoring.dashboard_state import DashboardState
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.batches import Batches
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.recovery import plan_recovery
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.service.state import ServiceState, StateGuard
from prorl_envs.rollout.store.sql import SqlStore

log = logging.getLogger(__name__)


class Closable(Protocol):
    async def aclose(self) -> None: ...


@dataclass(eq=False)
class Lifecycle:
    """Starts and stops the work of a service.

    Args:
        guard: state of the service.
        settings: initial concurrency limits, and timeouts.
        store: has the unfinished jobs of an earlier service.
        engine, groups, batches, episodes, feed, model_servers, dashboard: parts of the service.
        monitors: parts that are closed after all others have stopped.
        clock: measures the waits.
    """

    guard: StateGuard
    settings: ServiceSettings
    store: SqlStore
    engine: Engine
    groups: Groups
    batches: Batches
    episodes: InteractiveEpisodes
    feed: ResultFeed
    model_servers: ModelServers
    dashboard: DashboardState
    monitors: Sequence[Closable]
    clock: Clock

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
                self.engine.give_up(result)
            if recovery.task is not None:
                share = self.batches.share(group.batch_id)
                self.engine.readmit(group, recovery.task, recovery.samples, share=share)
                leases.grant("groups", group.request.id, group.request.lease_s)
        # Only now: a group that was submitted during recovery would be among the unfinished groups as well.
        self.guard.state = ServiceState.SERVING
        self.batches.start()
        leases.start()

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
            async with self.clock.timeout(drain_s):
                await self.engine.settled()
        except TimeoutError:
            log.info("stopping %d unfinished jobs", len(self.engine.scheduler))
        finally:  # also if the drain is cancelled
            self.engine.cancel_all()
            await asyncio.shield(self._close())

    def pause(self, mode: Pause) -> None:
        """Accept groups, but start no stages until `resume`. A restarted service is not paused.

        Args:
            mode: which stages do not start.
        """
        log.warning("paused: %s", mode)
        self.engine.pause(mode)

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
            async with self.clock.timeout(wait_s):
                await self.engine.settled()

    def resume(self) -> None:
        """End a pause or a drain.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        self.guard.check_operable()
        log.warning("resumed")
        self.guard.state = ServiceState.SERVING
        self.engine.resume()
        self.batches.freed()

    def resize(self, request: LimitsRequest) -> None:
        """Change the concurrency limits until the service stops. Work above a lowered limit continues."""
        changes = request.model_dump(exclude_none=True)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in changes.items()))
        self.settings = ServiceSettings.model_validate({**self.settings.model_dump(), **changes})
        self.groups.admission.queue = self.settings.queue
        self.engine.resize(StageLimits.of_settings(self.settings))

    async def _stop_batches(self) -> None:
        await self.batches.aclose()
        await self.groups.leases.aclose()

    async def _close(self) -> None:
        await self._stop_batches()  # again, since a cancellation may have interrupted the first call
        try:
            async with self.clock.timeout(2 * self.settings.close_s):  # to interrupt a stage, then to close
                await self.episodes.aclose()
                await self.engine.settled()
        except TimeoutError:
            log.error(
                "%d jobs do not stop; closing the node will stop their sandboxes", len(self.engine.scheduler)
            )
        self.guard.state = ServiceState.STOPPED
        for monitor in (self.dashboard, *self.monitors):
            await monitor.aclose()
