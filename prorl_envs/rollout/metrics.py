"""Prometheus metrics of one service. Gauges are read when they are asked for; what a job took is counted
once, from its result, so that a job costs the same however often somebody looks.

Names and types follow https://prometheus.io/docs/practices/naming/.
"""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prorl_envs.env.node import NodeUse
from prorl_envs.rollout.batch_plan import Judgement
from prorl_envs.rollout.batch_types import BatchState, BatchView
from prorl_envs.rollout.metrics_nodes import nodes, sandboxes, use_of
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.placement import HEAD
from prorl_envs.rollout.types import Result, Stage, Trajectory
from prorl_envs.rollout.views import RouterView, StatusView

#: What `Metrics.text` is.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

#: Upper bounds in seconds, from a tool call to a build.
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_TURNS = (1, 2, 3, 5, 8, 13, 20, 30, 50, 100, 200)
_TOKENS = (256, 1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)


class Metrics:
    """What `/metrics` shows.

    Args:
        status: the service now.
        node: what it uses of its machine now.
        batches: those that are kept, now.
        fleet: further machines, or None.
    """

    def __init__(
        self,
        status: Callable[[], StatusView],
        node: Callable[[], NodeUse],
        batches: Callable[[], list[BatchView]],
        fleet: Fleet | None = None,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._groups = Counter(
            "prorl_batch_groups_decided",
            "Groups of batches that were decided, and why these are not informative.",
            ["verdict", "reason"],
            registry=registry,
        )
        family = ["environment"]
        self._results = Counter(
            "prorl_results", "Jobs that came to a result.", [*family, "state"], registry=registry
        )
        self._failures = Counter(
            "prorl_failures",
            "Results without a reward, by the boundary that failed and the stage.",
            [*family, "kind", "stage"],
            registry=registry,
        )
        self._stops = Counter(
            "prorl_agent_stops", "Why the agent loop ended.", [*family, "reason"], registry=registry
        )
        self._rewards = Summary("prorl_reward", "Rewards that graders gave.", family, registry=registry)
        self._queued = _seconds("prorl_job_queued_seconds", "Waiting for stages.", family, registry)
        self._stages = _seconds(
            "prorl_job_stage_seconds", "Active time in a stage.", [*family, "stage"], registry
        )
        self._calls = _seconds(
            "prorl_model_call_seconds", "One call of a model server.", ["server"], registry
        )
        self._tools = _seconds("prorl_turn_tools_seconds", "The tool calls of one turn.", family, registry)
        self._turns = Histogram(
            "prorl_job_turns", "Model calls of a job.", family, buckets=_TURNS, registry=registry
        )
        self._length = Histogram(
            "prorl_job_tokens", "Tokens of a trajectory.", family, buckets=_TOKENS, registry=registry
        )
        self._tokens = Counter(
            "prorl_trajectory_tokens",
            "Tokens in results, sampled by the model or observed by it.",
            [*family, "origin"],
            registry=registry,
        )
        self._drift = Counter(
            "prorl_drift_tokens", "Prompt tokens that differed from what was recorded.", registry=registry
        )
        registry.register(_Now(status, node, batches, fleet))
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
            self._observe_trajectory(result)

    def decided(self, judgement: Judgement) -> None:
        """Count a decided group, once."""
        self._groups.labels(judgement.verdict, judgement.reason).inc()

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self._registry)

    def _observe_trajectory(self, result: Result) -> None:
        family = result.environment
        self._turns.labels(family).observe(sum(len(row.turns) for row in result.rows))
        self._length.labels(family).observe(sum(len(row.ids) for row in result.rows))
        for row in result.rows:
            self._observe_row(family, row)

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


def _seconds(name: str, what: str, labels: list[str], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, f"Seconds: {what}", labels, buckets=_SECONDS, registry=registry)


class _Now(Collector):
    """What is known at the moment of asking."""

    def __init__(
        self,
        status: Callable[[], StatusView],
        node: Callable[[], NodeUse],
        batches: Callable[[], list[BatchView]],
        fleet: Fleet | None,
    ) -> None:
        self._status = status
        self._node = node
        self._batches = batches
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield from _service(status)
        yield from _model_servers(status)
        told = self._fleet.told() if self._fleet is not None else {}
        yield from sandboxes({HEAD: self._node(), **{name: use_of(beat) for name, beat in told.items()}})
        yield from nodes(self._fleet.views() if self._fleet is not None else (), told)
        yield from _kept_batches(self._batches())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else it would be collected once, before there is a service


def _service(status: StatusView) -> Iterator[Metric]:
    yield _gauge("prorl_up_seconds", "Since the service's start.", status.uptime_s)
    state = GaugeMetricFamily(
        "prorl_service_state", "1 for the state that the service is in.", labels=["state"]
    )
    state.add_metric([status.state], 1)
    yield state
    for what in ("active", "waiting", "limit"):
        pool = GaugeMetricFamily(f"prorl_pool_{what}", _POOL[what], labels=["stage"])
        for stage, view in status.pools.items():
            pool.add_metric([stage], getattr(view, what))
        yield pool
    yield _gauge("prorl_live_jobs", "Jobs that hold a sandbox.", status.live)
    yield _gauge("prorl_live_jobs_limit", "Most of them.", status.live_limit)
    yield _gauge("prorl_unfinished_jobs", "Jobs accepted and not gone.", status.unfinished)
    yield _gauge("prorl_queue_limit", "Most of them.", status.queue_limit)
    yield _counter("prorl_retries", "Attempts beyond the first.", status.retries)
    yield _counter("prorl_close_failures", "Sandboxes that did not close in order.", status.close_failures)
    yield _counter("prorl_internal_errors", "Bugs met.", status.internal_errors)


_POOL = {
    "active": "Jobs in the stage.",
    "waiting": "Jobs that wait for it.",
    "limit": "Most jobs in it at once.",
}


def _model_servers(status: StatusView) -> Iterator[Metric]:
    views = {
        "in_flight": "Calls that the server is answering.",
        "sessions": "Rollouts pinned to the server.",
        "healthy": "Whether the server did not fail last.",
        "draining": "Whether the server gets nothing more.",
    }
    for name, what in views.items():
        family = GaugeMetricFamily(f"prorl_model_server_{name}", what, labels=["server"])
        for server in status.model_servers:
            family.add_metric([server.url], float(getattr(server, name)))
        yield family
    if status.router is not None:
        yield from _router(status.router)


def _router(router: RouterView) -> Iterator[Metric]:
    yield _counter("prorl_router_turns", "Model calls that were routed.", router.turns)
    yield _counter("prorl_router_prompt_tokens", "Tokens of their prompts.", router.prompt_tokens)
    hits = GaugeMetricFamily(
        "prorl_router_hit_rate",
        "Share of prompt tokens in a server's prefix cache: by the router's books, and as servers tell.",
        labels=["by"],
    )
    for by, rate in (("router", router.expected_hit_rate), ("servers", router.told_hit_rate)):
        if rate is not None:
            hits.add_metric([by], rate)
    yield hits
    moves = CounterMetricFamily("prorl_router_moves", "Sessions that left a server.", labels=["why"])
    moves.add_metric(["balance"], router.moved)
    moves.add_metric(["lost"], router.lost)
    yield moves
    yield _gauge("prorl_router_spread", "Most calls in flight over the mean of the servers.", router.spread)
    yield _gauge("prorl_router_paused", "1 while turns are held.", router.paused)
    yield _counter("prorl_router_paused_seconds", "Seconds of that, all in all.", router.paused_s)


def _kept_batches(batches: list[BatchView]) -> Iterator[Metric]:
    states = GaugeMetricFamily("prorl_batches", "Batches that are kept.", labels=["state"])
    for state in BatchState:
        states.add_metric([state], sum(batch.state is state for batch in batches))
    yield states
    running = [batch for batch in batches if batch.state is BatchState.RUNNING]
    waiting = sum(batch.waiting_for_tasks for batch in running)
    yield _gauge("prorl_batches_without_tasks", "Running batches that wait for further tasks.", waiting)
    groups = GaugeMetricFamily(
        "prorl_batch_groups", "Groups of the running batches: wanted, informative, under way.", labels=["of"]
    )
    for name in ("wanted", "informative", "in_flight"):
        groups.add_metric([name], sum(getattr(batch, name) for batch in running))
    yield groups


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(name, what, value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value)
