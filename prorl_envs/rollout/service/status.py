"""Status of a service: its pools, queues and counts."""

from dataclasses import dataclass, field

from prorl_envs import __version__
from prorl_envs.clock import Clock
from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.api.views import PoolView, StatusView
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.service.admission import AdmissionControl
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.service.state import StateGuard


@dataclass(eq=False)
class StatusReader:
    """Reads the status of a service from its parts. The uptime starts when it is created."""

    guard: StateGuard
    engine: Engine
    admission: AdmissionControl
    episodes: InteractiveEpisodes
    feed: ResultFeed
    model_servers: ModelServers
    clock: Clock
    _created_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._created_at = self.clock.monotonic()

    def read(self) -> StatusView:
        """Return the current status."""
        engine, scheduler = self.engine, self.engine.scheduler
        active, waiting = scheduler.active, scheduler.waiting
        return StatusView(
            version=__version__,
            state=self.guard.state,
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
            queue_limit=self.admission.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors + self.episodes.internal_errors,
            newest_cursor=self.feed.newest,
            model_servers=self.model_servers.all().servers,
            router=self.model_servers.router(),
        )
