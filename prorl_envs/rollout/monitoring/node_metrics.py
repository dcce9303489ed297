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
    "prorl_sandboxes_warm": ("Of these, those that stand ready.", "warm"),
    "prorl_sandbox_starts_active": ("Sandboxes that start now.", "starting"),
    "prorl_sandbox_starts_waiting": ("Sandboxes that wait for their turn to.", "waiting"),
}
_COUNTERS = {
    "prorl_sandboxes_from_pool": ("Sandboxes that stood ready when asked for.", "from_pool"),
    "prorl_sandbox_failures": ("Sandboxes that did not start.", "failed"),
}
_POOL = {
    "active": "Jobs in the stage on the node.",
    "waiting": "Jobs on the node that wait for it.",
    "limit": "Most jobs in it at once there.",
}


def use_of(heartbeat: Mapping[str, float]) -> NodeUse:
    """Return the values of a node's last heartbeat; missing values are 0."""
    known: dict[str, Any] = {field.name: heartbeat.get(field.name, 0) for field in fields(NodeUse)}
    return NodeUse(**known)


def sandboxes(uses: Mapping[str, NodeUse]) -> Iterator[Metric]:
    """Yield the sandbox metrics of each machine or process, by name."""
    for name, (what, key) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, what, labels=["node"])
        for node, use in uses.items():
            gauge.add_metric([node], getattr(use, key))
        yield gauge
    for name, (what, key) in _COUNTERS.items():
        counter = CounterMetricFamily(name, what, labels=["node"])
        for node, use in uses.items():
            counter.add_metric([node], getattr(use, key))
        yield counter
    what = "Seconds from asking for a sandbox to having it."
    ready = SummaryMetricFamily("prorl_sandbox_ready_seconds", what, labels=["node"])
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
    there = [view for view in views if view.pools is not None]
    for key, what in _POOL.items():
        pool = GaugeMetricFamily(f"prorl_node_pool_{key}", what, labels=["node", "stage"])
        for view in there:
            for stage, one in (view.pools or {}).items():
                pool.add_metric([view.name, stage], getattr(one, key))
        yield pool
    live = GaugeMetricFamily(
        "prorl_node_jobs_with_sandbox", "Jobs that hold a sandbox there.", labels=["node"]
    )
    most = GaugeMetricFamily("prorl_node_max_jobs_with_sandbox", "Most of them.", labels=["node"])
    attempts = CounterMetricFamily("prorl_node_attempts", "Attempts that ended there.", labels=["node"])
    for view in there:
        live.add_metric([view.name], view.jobs_with_sandbox)
        most.add_metric([view.name], view.max_jobs_with_sandbox)
        attempts.add_metric([view.name], view.attempts)
    yield from (live, most, attempts)
    yield from _processes(heartbeats)


def _processes(heartbeats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    cpu = CounterMetricFamily(
        "prorl_node_cpu_seconds", "Processor time of the node's process.", labels=["node"]
    )
    memory = GaugeMetricFamily(
        "prorl_node_resident_memory_bytes", "Memory of the node's process.", labels=["node"]
    )
    for node, beat in heartbeats.items():
        cpu.add_metric([node], beat.get("cpu_s", 0.0))
        memory.add_metric([node], beat.get("memory", 0.0))
    yield from (cpu, memory)
