"""Rollout service: its parts. `build.py` composes them, and the HTTP routes call them."""

from dataclasses import dataclass

from prorl_envs.config import ServiceSettings
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.model.types import ModelClient, Renderer
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeView
from prorl_envs.rollout.monitoring.dashboard_state import DashboardState
from prorl_envs.rollout.monitoring.metrics import Metrics
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.service.admission import Quota
from prorl_envs.rollout.service.batches import Batches
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.lifecycle import Lifecycle
from prorl_envs.rollout.service.live_jobs import LiveJobs
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.service.state import StateGuard
from prorl_envs.rollout.service.status import StatusReader
from prorl_envs.rollout.store.sql import SqlStore


@dataclass(slots=True, eq=False, kw_only=True)
class RolloutService:
    """Rollout service: accepts groups, runs their jobs through the stages, and stores the results.

    The service must be started, used and stopped in one event loop.

    Attributes:
        settings: the settings that the service was built with.
        renderer: the model's tokenizer and chat template.
        model: client of the model servers; the service does not close it.
        store: stores groups and results.
        guard: state of the service.
        groups: groups and their jobs, with environments, quotas and leases.
        feed: stream of results.
        batches: batches of informative groups.
        episodes: episodes that a caller drives step by step.
        lifecycle: start, stop, pause, drain, resume, resize.
        model_servers: operations of callers on the model servers.
        fleet: further nodes that run jobs, or None.
        live_jobs, status, dashboard, metrics: views of the running service.
        connections: counts of the HTTP server's connections.
    """

    settings: ServiceSettings
    renderer: Renderer
    model: ModelClient
    store: SqlStore
    guard: StateGuard
    groups: Groups
    feed: ResultFeed
    batches: Batches
    episodes: InteractiveEpisodes
    lifecycle: Lifecycle
    model_servers: ModelServers
    fleet: Fleet | None
    live_jobs: LiveJobs
    status: StatusReader
    dashboard: DashboardState
    metrics: Metrics
    connections: ConnectionCounts

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
        self.groups.admission.check_episode(request.id, quota)
        return await self.episodes.start(request, task, wait_s=wait_s)
