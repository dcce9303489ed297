"""What `/metrics` shows of each machine and process: its sandboxes, and of a node what it has to do.

A node is not scraped: it tells the head with every beat, and the head shows it under the label `node`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from prorl_envs.env.node import NodeUse
from prorl_envs.rollout.views import NodeView

_GAUGES = {
    "prorl_sandboxes_open": ("Sandboxes that are not closed.", "open"),
    "prorl_sandboxes_warm": ("Of these, those that stand ready.", "warm"),
    "prorl_sandbox_starts_active": ("Sandboxes that start now.", "starting"),
    "prorl_sandbox_starts_waiting": ("Sandboxes that wait for their turn to.", "waiting"),
    "prorl_sandbox_starts_limit": ("Most that may start at once.", "starts_limit"),
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


def use_of(told: Mapping[str, float]) -> NodeUse:
    """What a node told with its last beat; what it did not tell is 0."""
    known: dict[str, Any] = {field.name: told.get(field.name, 0) for field in fields(NodeUse)}
    return NodeUse(**known)


def sandboxes(uses: Mapping[str, NodeUse]) -> Iterator[Metric]:
    """Of each machine or process, by name."""
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
    slowed = CounterMetricFamily(
        "prorl_sandbox_starts_slowed", "How often that bound was lowered.", labels=["node", "why"]
    )
    what = "Seconds from asking for a sandbox to having it."
    ready = SummaryMetricFamily("prorl_sandbox_ready_seconds", what, labels=["node"])
    for node, use in uses.items():
        slowed.add_metric([node, "slow"], use.slow)
        slowed.add_metric([node, "memory"], use.short)
        ready.add_metric([node], use.given, use.seconds)
    yield slowed
    yield ready


def nodes(views: Iterable[NodeView], told: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    """Of the nodes beside the service's own process.

    Args:
        views: all of them, and those that were lost.
        told: by name, what each that is there told with its last beat.
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
    live = GaugeMetricFamily("prorl_node_live_jobs", "Jobs that hold a sandbox there.", labels=["node"])
    most = GaugeMetricFamily("prorl_node_live_jobs_limit", "Most of them.", labels=["node"])
    attempts = CounterMetricFamily("prorl_node_attempts", "Attempts that ended there.", labels=["node"])
    for view in there:
        live.add_metric([view.name], view.live)
        most.add_metric([view.name], view.live_limit)
        attempts.add_metric([view.name], view.attempts)
    yield from (live, most, attempts)
    yield from _processes(told)


def _processes(told: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    cpu = CounterMetricFamily(
        "prorl_node_cpu_seconds", "Processor time of the node's process.", labels=["node"]
    )
    memory = GaugeMetricFamily(
        "prorl_node_resident_memory_bytes", "Memory of the node's process.", labels=["node"]
    )
    for node, beat in told.items():
        cpu.add_metric([node], beat.get("cpu_s", 0.0))
        memory.add_metric([node], beat.get("memory", 0.0))
    yield from (cpu, memory)
