"""Lifecycle of a service: start, stop, and the operator's changes while the service runs."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.rollout.api.dashboard import LimitsRequest
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.batches.manager import Batches
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.gate import ServiceGate, ServiceState
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.recovery import plan_recovery
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.store.base import Store

log = logging.getLogger(__name__)


class Closable(Protocol):
    async def aclose(self) -> None: ...


class Lifecycle:
    """Starts and stops the work of a service.

    Args:
        gate: state of the service.
        settings: initial concurrency limits, and timeouts.
        store: has the unfinished jobs of an earlier service.
        engine, groups, batches, episodes, feed, model_servers: parts of the service.
        monitors: parts that are closed after all others have stopped.
        clock: measures the waits.
    """

    def __init__(
        self,
        gate: ServiceGate,
        settings: ServiceSettings,
        store: Store,
        engine: Engine,
        groups: Groups,
        batches: Batches,
        episodes: InteractiveEpisodes,
        feed: ResultFeed,
        model_servers: ModelServers,
        monitors: Sequence[Closable],
        clock: Clock,
    ) -> None:
        self._gate = gate
        self._settings = settings
        self._store = store
        self._engine = engine
        self._groups = groups
        self._batches = batches
        self._episodes = episodes
        self._feed = feed
        self._model_servers = model_servers
        self._monitors = monitors
        self._clock = clock

    async def start(self) -> None:
        """Resume the unfinished jobs of the store, each with a new attempt, and start to serve. Jobs that
        cannot continue fail, without an effect on other jobs."""
        self._feed.newest = await self._store.newest()
        await self._model_servers.restore()
        unfinished = await self._store.unfinished()
        await self._batches.restore()  # before the groups of batches produce results
        leases = self._groups.leases
        for group in unfinished:
            recovery = plan_recovery(group, self._groups.environments.load)
            for result in recovery.given_up:
                self._engine.give_up(result)
            if recovery.task is not None:
                share = self._batches.share(group.batch_id)
                self._engine.readmit(group, recovery.task, recovery.samples, share=share)
                leases.grant("groups", group.request.id, group.request.lease_s)
        # Only now: a group that was submitted during recovery would be among the unfinished groups as well.
        self._gate.state = ServiceState.SERVING
        self._batches.start()
        leases.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """Stop the service. It accepts no more work; results can still be read. Idempotent.

        Args:
            drain_s: seconds for accepted jobs to finish. Remaining jobs are then cancelled; with a durable
                store they are kept for the next start instead. Every sandbox is closed before this returns.
        """
        if self._gate.state is ServiceState.STOPPED:
            return
        self._gate.stopping = True
        async with self._gate.lock:  # groups that are being accepted are admitted first
            self._gate.state = ServiceState.DRAINING
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
        self._engine.pause(mode)

    async def drain(self, wait_s: float = 0.0) -> None:
        """Accept no more work until `resume`, and finish the accepted jobs. Idempotent.

        Args:
            wait_s: maximum seconds to wait until all jobs are finished and their sandboxes are closed.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        async with self._gate.lock:  # groups that are being accepted are admitted first
            self._gate.check_operable()
            if self._gate.state is ServiceState.SERVING:
                log.warning("draining")
                self._gate.state = ServiceState.DRAINING
        with contextlib.suppress(TimeoutError):  # the caller sees from the status whether jobs remain
            async with self._clock.timeout(wait_s):
                await self._engine.settled()

    def resume(self) -> None:
        """End a pause or a drain.

        Raises:
            Unavailable: the service has not started, or is stopping.
        """
        self._gate.check_operable()
        log.warning("resumed")
        self._gate.state = ServiceState.SERVING
        self._engine.resume()
        self._batches.freed()

    def resize(self, request: LimitsRequest) -> None:
        """Change the concurrency limits until the service stops. Work above a lowered limit continues."""
        changes = request.model_dump(exclude_none=True)
        log.warning("limits: %s", ", ".join(f"{name} {value}" for name, value in changes.items()))
        self._settings = ServiceSettings.model_validate({**self._settings.model_dump(), **changes})
        self._groups.admission.queue = self._settings.queue
        self._engine.resize(StageLimits.of_settings(self._settings))

    async def _stop_batches(self) -> None:
        await self._batches.aclose()
        await self._groups.leases.aclose()

    async def _close(self) -> None:
        await self._stop_batches()  # again, since a cancellation may have interrupted the first call
        try:
            async with self._clock.timeout(2 * self._settings.close_s):  # to interrupt a stage, then to close
                await self._episodes.aclose()
                await self._engine.settled()
        except TimeoutError:
            log.error(
                "%d jobs do not stop; closing the node will stop their sandboxes", len(self._engine.scheduler)
            )
        self._gate.state = ServiceState.STOPPED
        for monitor in self._monitors:
            await monitor.aclose()
