"""Composition of the rollout service: create its parts, in order of their dependencies, and connect them."""

import logging
from collections.abc import Mapping

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.model.types import ModelClient, Renderer
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.episode.defaults import Defaults
from prorl_envs.rollout.episode.engine import Engine
from prorl_envs.rollout.episode.environments import EnvironmentRegistry
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.monitoring.dashboard_state import DashboardSnapshot, DashboardState
from prorl_envs.rollout.monitoring.metrics import Metrics, ScrapeCollector
from prorl_envs.rollout.monitoring.sandbox_memory import SandboxMemory
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.scheduling.scheduler import Scheduler
from prorl_envs.rollout.service.admission import AdmissionControl
from prorl_envs.rollout.service.batches import Batches
from prorl_envs.rollout.service.groups import Groups
from prorl_envs.rollout.service.interactive import InteractiveEpisodes
from prorl_envs.rollout.service.leases import Leases
from prorl_envs.rollout.service.lifecycle import Lifecycle
from prorl_envs.rollout.service.live_jobs import LiveJobs
from prorl_envs.rollout.service.model_servers import ModelServers
from prorl_envs.rollout.service.notifier import Notifier
from prorl_envs.rollout.service.read_tracker import ReadTracker
from prorl_envs.rollout.service.result_feed import ResultFeed
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.service.state import StateGuard
from prorl_envs.rollout.service.status import StatusReader
from prorl_envs.rollout.store.sqlite import MemoryStore, SqlStore

log = logging.getLogger(__name__)

#: Number of running jobs that the dashboard shows.
SHOWN_JOBS = 50


def build_service(
    node: Node,
    environments: Mapping[str, Family],
    renderer: Renderer,
    model: ModelClient,
    settings: ServiceSettings | None = None,
    store: SqlStore | None = None,
    clock: Clock | None = None,
    defaults: Mapping[str, Defaults] | None = None,
    fleet: Fleet | None = None,
) -> RolloutService:
    """Build the rollout service of one machine. The caller starts and stops it.

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
    """
    settings, clock = settings or ServiceSettings(), clock or SystemClock()
    store = store or MemoryStore(**settings.retention.of_results)
    guard, notifier, leases = StateGuard(), Notifier(clock), Leases(clock)
    registry = EnvironmentRegistry(environments, defaults)
    model_servers = ModelServers(model, store, clock)
    feed = ResultFeed(store, ReadTracker(store, settings.retention, clock), notifier)

    agent = Agent(renderer, model, clock, settings.reasoning)
    worker = Worker(node, environments, agent, clock, grace_s=settings.grace_s, close_s=settings.close_s)
    limits, takes_jobs = StageLimits.of_settings(settings), fleet is None or fleet.head_takes_jobs
    scheduler = Scheduler(limits, here=takes_jobs, max_sandboxes=node.max_sandboxes)
    if takes_jobs and limits.max_jobs_with_sandbox > node.max_sandboxes:
        log.warning("this process's limits allow %d sandboxes; further jobs wait", node.max_sandboxes)
    engine = Engine(scheduler, fleet or worker, store, clock, feed.recorded)
    if fleet is not None:
        fleet.attach(worker, engine)

    episodes = InteractiveEpisodes(
        fleet or worker, agent, engine, clock, max_open=settings.episodes, idle_s=settings.episode_idle_s
    )
    admission = AdmissionControl(settings.queue, engine, episodes, store)
    groups = Groups(guard, registry, admission, store, engine, leases, notifier)
    batches = Batches(groups, settings, clock)

    memory = SandboxMemory(clock, node.memory)
    status = StatusReader(guard, engine, admission, episodes, feed, model_servers, clock)
    live_jobs = LiveJobs(engine, memory.look, clock)

    def snapshot() -> DashboardSnapshot:
        return DashboardSnapshot(
            status=status.read(),
            attempts_limit=scheduler.attempts,
            use=node.use,
            memory=memory.look(),
            batches=batches.views(),
            nodes=fleet.views() if fleet is not None else [],
            running=live_jobs.running(SHOWN_JOBS),
        )

    dashboard = DashboardState(clock, store, snapshot)
    connections = ConnectionCounts()
    metrics = Metrics(
        ScrapeCollector(
            status.read, lambda: node.use, batches.views, lambda: store.unread, fleet, connections
        )
    )

    groups.reserve(batches.owns)
    leases.on_expiry("groups", groups.cancel)
    leases.on_expiry("batches", batches.cancel)
    engine.on_free(batches.freed)
    batches.on_decision(metrics.decided)
    feed.subscribe(metrics.observe, dashboard.observe, batches.ended)

    lifecycle = Lifecycle(
        guard,
        settings,
        store,
        engine,
        groups,
        batches,
        episodes,
        feed,
        model_servers,
        dashboard,
        (memory, notifier),
        clock,
    )
    return RolloutService(
        settings=settings,
        renderer=renderer,
        model=model,
        store=store,
        guard=guard,
        groups=groups,
        feed=feed,
        batches=batches,
        episodes=episodes,
        lifecycle=lifecycle,
        model_servers=model_servers,
        fleet=fleet,
        live_jobs=live_jobs,
        status=status,
        dashboard=dashboard,
        metrics=metrics,
        connections=connections,
    )
