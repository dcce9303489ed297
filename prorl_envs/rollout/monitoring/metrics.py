"""Prometheus metrics of one service. Gauges are read on each scrape. The times of a job are counted once,
from its result, so that their cost does not depend on the number of scrapes.

Names and types follow https://prometheus.io/docs/practices/naming/.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from prorl_envs.env.node import NodeUse
from prorl_envs.listener.connection import ConnectionCounts
from prorl_envs.listener.listener import REASONS
from prorl_envs.model.types import ServerHealth
from prorl_envs.rollout.api.batches import BatchState, BatchView
from prorl_envs.rollout.api.types import Result, Stage, Trajectory
from prorl_envs.rollout.api.views import NodeView, RouterView, StatusView
from prorl_envs.rollout.batches.dynamic_sampling import GroupDecision
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.scheduling.placement import HEAD
from prorl_envs.rollout.store.base import UnreadResults

_gauge, _counter = GaugeMetricFamily, CounterMetricFamily

#: Content type of `Metrics.text`.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

#: Upper bounds of histogram buckets in seconds: from a short tool call to a long build.
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TURNS = (1, 2, 3, 5, 8, 13, 20, 30, 50, 100, 200)
_TOKENS = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)


class Metrics:
    """Metrics of `/metrics`.

    Args:
        current: collects the values that are read on each scrape.
    """

    def __init__(self, current: Collector) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(name, help_text, labels, registry=registry)

        def histogram(
            name: str, help_text: str, *labels: str, buckets: Sequence[float] = _SECONDS
        ) -> Histogram:
            return Histogram(name, help_text, labels, buckets=buckets, registry=registry)

        family = "environment"
        decided = "Decided groups of batches, by verdict and by the reason why a group is not informative."
        self._groups = counter("prorl_batch_groups_decided", decided, "verdict", "reason")
        self._results = counter("prorl_results", "Finished jobs, by final state.", family, "state")
        failures = "Results without a reward, by the boundary that failed and the stage."
        self._failures = counter("prorl_failures", failures, family, "kind", "stage")
        self._stops = counter("prorl_agent_stops", "Agent loops, by stop reason.", family, "reason")
        self._rewards = Summary("prorl_reward", "Rewards that graders gave.", [family], registry=registry)
        queued = "Seconds that a job waited for its stages."
        self._queued = histogram("prorl_job_queued_seconds", queued, family)
        in_stage = "Seconds that a job spent in a stage."
        self._stages = histogram("prorl_job_stage_seconds", in_stage, family, "stage")
        calls = "Seconds of one call of a model server."
        self._calls = histogram("prorl_model_call_seconds", calls, "server")
        tools = "Seconds of the tool calls of one turn."
        self._tools = histogram("prorl_turn_tools_seconds", tools, family)
        self._turns = histogram("prorl_job_turns", "Model calls of a job.", family, buckets=_TURNS)
        self._length = histogram("prorl_job_tokens", "Tokens of a trajectory.", family, buckets=_TOKENS)
        tokens = "Tokens in results, by origin: sampled by the model, or observed by it."
        self._tokens = counter("prorl_trajectory_tokens", tokens, family, "origin")
        drift = "Prompt tokens that differed from the recorded ones."
        self._drift = counter("prorl_drift_tokens", drift)
        registry.register(current)
        ProcessCollector(registry=registry)

    def observe(self, result: Result) -> None:
        """Count a result, once."""
        family = result.environment
        self._results.labels(family, result.state).inc()
        if result.failure is not None:
            self._failures.labels(family, result.failure.kind, result.failure.stage).inc()
        if result.stop_reason is not None:
            self._stops.labels(family, result.stop_reason).inc()
        if result.reward is not None:
            self._rewards.labels(family).observe(result.reward)
        timings = result.timings
        self._queued.labels(family).observe(timings.queued_s)
        for stage in Stage:
            if seconds := getattr(timings, f"{stage}_s"):
                self._stages.labels(family, stage).observe(seconds)
        if result.trajectory is not None:
            self._turns.labels(family).observe(sum(len(row.turns) for row in result.rows))
            self._length.labels(family).observe(sum(len(row.ids) for row in result.rows))
            for row in result.rows:
                self._observe_row(family, row)

    def decided(self, decision: GroupDecision) -> None:
        """Count a decided group, once."""
        self._groups.labels(decision.verdict, decision.reason).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe_row(self, family: str, trajectory: Trajectory) -> None:
        sampled = sum(turn.end - turn.start for turn in trajectory.turns)
        self._tokens.labels(family, "sampled").inc(sampled)
        self._tokens.labels(family, "observed").inc(len(trajectory.ids) - sampled)
        self._drift.inc(trajectory.drift)
        tools, calls = self._tools.labels(family), {}
        for turn in trajectory.turns:
            if turn.server not in calls:
                calls[turn.server] = self._calls.labels(turn.server)
            calls[turn.server].observe(turn.model_s)
            tools.observe(turn.tools_s)


@dataclass(eq=False)
class ScrapeCollector(Collector):
    """Collector of values that are read on each scrape.

    Args:
        status: returns the current status of the service.
        node: returns the number and state of the sandboxes on the service's machine.
        batches: returns the stored batches.
        unread: returns the numbers of unread and dropped results.
        fleet: further nodes, or None.
        connections: connection counts of the HTTP server.
    """

    status: Callable[[], StatusView]
    node: Callable[[], NodeUse]
    batches: Callable[[], list[BatchView]]
    unread: Callable[[], UnreadResults]
    fleet: Fleet | None
    connections: ConnectionCounts

    def collect(self) -> Iterator[Metric]:
        status = self.status()
        yield from _service(status)
        yield from _unread(self.unread())
        yield from _http(self.connections)
        yield from _model_servers(status)
        heartbeats = self.fleet.heartbeats() if self.fleet is not None else {}
        yield from _sandboxes(
            {HEAD: self.node(), **{name: _use_of(heartbeat) for name, heartbeat in heartbeats.items()}}
        )
        yield from _nodes(self.fleet.views() if self.fleet is not None else (), heartbeats)
        yield from _batches(self.batches())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # without this method, registration calls `collect`, before the service exists


def _service(status: StatusView) -> Iterator[Metric]:
    yield _gauge("prorl_up_seconds", "Seconds since the service's start.", status.uptime_s)
    help_text = "1 for the state that the service is in."
    yield _filled(_gauge("prorl_service_state", help_text, labels=["state"]), {status.state: 1})
    for field, help_text in _POOL.items():
        values = {stage: getattr(view, field) for stage, view in status.pools.items()}
        yield _filled(_gauge(f"prorl_pool_{field}", help_text, labels=["stage"]), values)
    yield _gauge("prorl_jobs_with_sandbox", "Jobs that hold a sandbox.", status.jobs_with_sandbox)
    help_text = "Maximum number of jobs that hold a sandbox."
    yield _gauge("prorl_max_jobs_with_sandbox", help_text, status.max_jobs_with_sandbox)
    yield _gauge(
        "prorl_unfinished_jobs", "Accepted jobs without a result or with an open sandbox.", status.unfinished
    )
    yield _gauge("prorl_queue_limit", "Maximum number of unfinished jobs.", status.queue_limit)
    yield _counter("prorl_retries", "Attempts beyond the first.", status.retries)
    yield _counter("prorl_close_failures", "Sandboxes that failed to close.", status.close_failures)
    yield _counter("prorl_internal_errors", "Errors caused by bugs.", status.internal_errors)


def _unread(unread: UnreadResults) -> Iterator[Metric]:
    yield _gauge("prorl_unread_results", "Results that no reader has acknowledged.", unread.results)
    yield _gauge("prorl_unread_tokens", "Tokens of these results.", unread.tokens)
    yield _counter("prorl_unread_results_dropped", "Unread results that were dropped.", unread.dropped)


def _http(connections: ConnectionCounts) -> Iterator[Metric]:
    yield _gauge("prorl_http_connections", "Open connections to the HTTP server.", connections.open)
    yield _gauge("prorl_http_connections_limit", "Maximum number of connections.", connections.limit)
    help_text = "Connections that the server closed or refused."
    closed = _counter("prorl_http_connections_closed", help_text, labels=["reason"])
    yield _filled(closed, {reason: connections.closed[reason] for reason in REASONS})


_POOL = {
    "active": "Jobs in the stage.",
    "waiting": "Jobs that wait for the stage.",
    "limit": "Maximum number of jobs in the stage at once.",
}


def _model_servers(status: StatusView) -> Iterator[Metric]:
    views = {
        "in_flight": "Calls that the server is answering.",
        "sessions": "Rollouts pinned to the server.",
    }
    for name, help_text in views.items():
        values = {server.url: float(getattr(server, name)) for server in status.model_servers}
        yield _filled(_gauge(f"prorl_model_server_{name}", help_text, labels=["server"]), values)
    family = GaugeMetricFamily(
        "prorl_model_server_state", "1 for the state that the server is in.", labels=["server", "state"]
    )
    for server in status.model_servers:
        for state in ServerHealth:
            family.add_metric([server.url, state], server.state is state)
    yield family
    if status.router is not None:
        yield from _router(status.router)


def _router(router: RouterView) -> Iterator[Metric]:
    yield _counter("prorl_router_turns", "Model calls that were routed.", router.turns)
    yield _counter("prorl_router_prompt_tokens", "Prompt tokens of routed calls.", router.prompt_tokens)
    hits = GaugeMetricFamily(
        "prorl_router_hit_rate",
        "Share of prompt tokens in a server's prefix cache: estimated by the router, or reported by servers.",
        labels=["source"],
    )
    for source, rate in (("router", router.expected_hit_rate), ("servers", router.reported_hit_rate)):
        if rate is not None:
            hits.add_metric([source], rate)
    yield hits
    moves = _counter("prorl_router_rerouted_sessions", "Sessions that left a server.", labels=["reason"])
    yield _filled(moves, {"rebalanced": router.rebalanced, "failed_over": router.failed_over})
    help_text = "Calls in flight of the busiest server, divided by the mean over all servers."
    yield _gauge("prorl_router_load_imbalance", help_text, router.load_imbalance)
    yield _gauge("prorl_router_paused", "1 while turns are held.", router.paused)
    yield _counter("prorl_router_paused_seconds", "Total seconds for which turns were held.", router.paused_s)


def _batches(batches: list[BatchView]) -> Iterator[Metric]:
    states = {state.value: sum(batch.state is state for batch in batches) for state in BatchState}
    yield _filled(_gauge("prorl_batches", "Stored batches.", labels=["state"]), states)
    running = [batch for batch in batches if batch.state is BatchState.RUNNING]
    waiting = sum(batch.waiting_for_tasks for batch in running)
    yield _gauge("prorl_batches_without_tasks", "Running batches that wait for further tasks.", waiting)
    help_text = "Groups of the running batches: wanted, informative, in flight."
    names = ("wanted", "informative", "in_flight")
    groups = {name: sum(getattr(batch, name) for batch in running) for name in names}
    yield _filled(_gauge("prorl_batch_groups", help_text, labels=["state"]), groups)


_GAUGES = {
    "prorl_sandboxes_open": ("Sandboxes that are not closed.", "open"),
    "prorl_sandboxes_warm": ("Open sandboxes that are unused, in the warm pool.", "warm"),
    "prorl_sandbox_starts_active": ("Sandboxes that are starting.", "starting"),
    "prorl_sandbox_starts_waiting": ("Sandbox starts that wait for the start limiter.", "waiting"),
}
_COUNTERS = {
    "prorl_sandboxes_from_pool": ("Sandboxes that were taken from the warm pool.", "from_pool"),
    "prorl_sandbox_failures": ("Sandboxes that failed to start.", "failed"),
}
_NODE_GAUGES = {
    "prorl_node_jobs_with_sandbox": ("Jobs that hold a sandbox on the node.", "jobs_with_sandbox"),
    "prorl_node_max_jobs_with_sandbox": ("Maximum number of these jobs.", "max_jobs_with_sandbox"),
}
_NODE_POOL = {
    "active": "Jobs in the stage on the node.",
    "waiting": "Jobs on the node that wait for the stage.",
    "limit": "Maximum number of jobs in the stage on the node at once.",
}


def _use_of(heartbeat: Mapping[str, float]) -> NodeUse:
    """Return the values of a node's last heartbeat; missing values are 0."""
    known: dict[str, Any] = {field.name: heartbeat.get(field.name, 0) for field in fields(NodeUse)}
    return NodeUse(**known)


def _filled[Family: CounterMetricFamily | GaugeMetricFamily](
    family: Family, values: Mapping[str, float]
) -> Family:
    """Add the values to a family with one label, by the label's value."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _sandboxes(uses: Mapping[str, NodeUse]) -> Iterator[Metric]:
    """Yield the sandbox metrics of each machine or process, by name."""
    for family_type, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (help_text, key) in metrics.items():
            values = {node: getattr(use, key) for node, use in uses.items()}
            yield _filled(family_type(name, help_text, labels=["node"]), values)
    help_text = "Seconds from the request for a sandbox until it is ready."
    ready = SummaryMetricFamily("prorl_sandbox_ready_seconds", help_text, labels=["node"])
    for node, use in uses.items():
        ready.add_metric([node], use.handed_out, use.seconds)
    yield ready


def _nodes(views: Iterable[NodeView], heartbeats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Yield the metrics of the nodes beside the service's own process, from their last heartbeats: nodes are
    not scraped."""
    views = list(views)
    state = GaugeMetricFamily(
        "prorl_node_state", "1 for the state that the node is in.", labels=["node", "state"]
    )
    for view in views:
        state.add_metric([view.name, view.state], 1)
    yield state
    with_pools = [view for view in views if view.pools is not None]
    for key, help_text in _NODE_POOL.items():
        family = GaugeMetricFamily(f"prorl_node_pool_{key}", help_text, labels=["node", "stage"])
        for view in with_pools:
            for stage, pool in (view.pools or {}).items():
                family.add_metric([view.name, stage], getattr(pool, key))
        yield family
    for name, (help_text, key) in _NODE_GAUGES.items():
        values = {view.name: getattr(view, key) for view in with_pools}
        yield _filled(GaugeMetricFamily(name, help_text, labels=["node"]), values)
    attempts = CounterMetricFamily("prorl_node_attempts", "Attempts that ended on the node.", labels=["node"])
    yield _filled(attempts, {view.name: view.attempts for view in with_pools})
    help_text = "Processor time of the node's process."
    cpu = CounterMetricFamily("prorl_node_cpu_seconds", help_text, labels=["node"])
    yield _filled(cpu, {node: heartbeat.get("cpu_s", 0.0) for node, heartbeat in heartbeats.items()})
    help_text = "Memory of the node's process."
    memory = GaugeMetricFamily("prorl_node_resident_memory_bytes", help_text, labels=["node"])
    yield _filled(memory, {node: heartbeat.get("memory", 0.0) for node, heartbeat in heartbeats.items()})
