"""Metrics of each machine and process: its sandboxes, and the jobs of a node.

Nodes are not scraped: the head requests their values at every heartbeat, and exports them by `node`.
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
_NODE_GAUGES = {
    "prorl_node_jobs_with_sandbox": ("Jobs that hold a sandbox on the node.", "jobs_with_sandbox"),
    "prorl_node_max_jobs_with_sandbox": ("Maximum number of these jobs.", "max_jobs_with_sandbox"),
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


def filled[Family: CounterMetricFamily | GaugeMetricFamily](
    family: Family, values: Mapping[str, float]
) -> Family:
    """Add the values to a family with one label, by the label's value."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def sandboxes(uses: Mapping[str, NodeUse]) -> Iterator[Metric]:
    """Yield the sandbox metrics of each machine or process, by name."""
    for family_type, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (help_text, key) in metrics.items():
            values = {node: getattr(use, key) for node, use in uses.items()}
            yield filled(family_type(name, help_text, labels=["node"]), values)
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
    for name, (help_text, key) in _NODE_GAUGES.items():
        values = {view.name: getattr(view, key) for view in with_pools}
        yield filled(GaugeMetricFamily(name, help_text, labels=["node"]), values)
    attempts = CounterMetricFamily("prorl_node_attempts", "Attempts that ended on the node.", labels=["node"])
    yield filled(attempts, {view.name: view.attempts for view in with_pools})
    help_text = "Processor time of the node's process."
    cpu = CounterMetricFamily("prorl_node_cpu_seconds", help_text, labels=["node"])
    yield filled(cpu, {node: heartbeat.get("cpu_s", 0.0) for node, heartbeat in heartbeats.items()})
    help_text = "Memory of the node's process."
    memory = GaugeMetricFamily("prorl_node_resident_memory_bytes", help_text, labels=["node"])
    yield filled(memory, {node: heartbeat.get("memory", 0.0) for node, heartbeat in heartbeats.items()})
