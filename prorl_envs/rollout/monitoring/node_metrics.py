"""Metrics of each machine and process: its sandboxes, and the jobs of a node.

A node is not scraped: the head asks for its values at every heartbeat, and exports them with the label
`node`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from prorl_envs.env.node import NodeUse
from prorl_envs.rollout.api.views import NodeView

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
_POOL = {
    "active": "Jobs in the stage on the node.",
    "waiting": "Jobs on the node that wait for the stage.",
    "limit": "Maximum number of jobs in the stage on the node at once.",
}


def use_of(heartbeat: Mapping[str, float]) -> NodeUse:
    """Return the values of a node's last heartbeat; missing values are 0."""
    known: dict[str, Any] = {field.name: heartbeat.get(field.name, 0) for field in fields(NodeUse)}
    return NodeUse(**known)


def sandboxes(uses: Mapping[str, NodeUse]) -> Iterator[Metric]:
    """Yield the sandbox metrics of each machine or process, by name."""
    for name, (help_text, key) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, help_text, labels=["node"])
        for node, use in uses.items():
            gauge.add_metric([node], getattr(use, key))
        yield gauge
    for name, (help_text, key) in _COUNTERS.items():
        counter = CounterMetricFamily(name, help_text, labels=["node"])
        for node, use in uses.items():
            counter.add_metric([node], getattr(use, key))
        yield counter
    help_text = "Seconds from the request for a sandbox until it is ready."
    ready = SummaryMetricFamily("prorl_sandbox_ready_seconds", help_text, labels=["node"])
    for node, use in uses.items():
        ready.add_metric([node], use.handed_out, use.seconds)
    yield ready


def nodes(views: Iterable[NodeView], heartbeats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Yield the metrics of the nodes beside the service's own process.

    Args:
        views: all nodes, including lost ones.
        heartbeats: by name, the last heartbeat of each connected node.
    """
    views = list(views)
    state = GaugeMetricFamily(
        "prorl_node_state", "1 for the state that the node is in.", labels=["node", "state"]
    )
    for view in views:
        state.add_metric([view.name, view.state], 1)
    yield state
    with_pools = [view for view in views if view.pools is not None]
    for key, help_text in _POOL.items():
        family = GaugeMetricFamily(f"prorl_node_pool_{key}", help_text, labels=["node", "stage"])
        for view in with_pools:
            for stage, pool in (view.pools or {}).items():
                family.add_metric([view.name, stage], getattr(pool, key))
        yield family
    jobs = GaugeMetricFamily(
        "prorl_node_jobs_with_sandbox", "Jobs that hold a sandbox on the node.", labels=["node"]
    )
    max_jobs = GaugeMetricFamily(
        "prorl_node_max_jobs_with_sandbox",
        "Maximum number of jobs that hold a sandbox on the node.",
        labels=["node"],
    )
    attempts = CounterMetricFamily("prorl_node_attempts", "Attempts that ended on the node.", labels=["node"])
    for view in with_pools:
        jobs.add_metric([view.name], view.jobs_with_sandbox)
        max_jobs.add_metric([view.name], view.max_jobs_with_sandbox)
        attempts.add_metric([view.name], view.attempts)
    yield from (jobs, max_jobs, attempts)
    yield from _processes(heartbeats)


def _processes(heartbeats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    cpu = CounterMetricFamily(
        "prorl_node_cpu_seconds", "Processor time of the node's process.", labels=["node"]
    )
    memory = GaugeMetricFamily(
        "prorl_node_resident_memory_bytes", "Memory of the node's process.", labels=["node"]
    )
    for node, heartbeat in heartbeats.items():
        cpu.add_metric([node], heartbeat.get("cpu_s", 0.0))
        memory.add_metric([node], heartbeat.get("memory", 0.0))
    yield from (cpu, memory)
