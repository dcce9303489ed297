"""`prorl-envs top`: live view of a service in the terminal."""

import asyncio
from collections.abc import Iterator, Sequence

from rich import filesize
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.commands.operate import jobs_table, nodes_table, servers_table
from prorl_envs.cli.output.console import out, plain
from prorl_envs.cli.output.progress import pools_grid
from prorl_envs.errors import ProrlError
from prorl_envs.rollout.api.dashboard import Bucket, DashboardView
from prorl_envs.rollout.api.errors import Retryable
from prorl_envs.rollout.client.client import RolloutClient

_POLL_S = 1.0
_SPARK = 32
_PANEL = 8
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LATENCIES = {
    "queued": "waiting",
    "init": "INIT",
    "run": "RUN",
    "eval": "EVAL",
    "model_call": "model call",
    "tools": "tools",
}


async def watch(client: RolloutClient) -> None:
    """Show the live view until interrupted; if the service stops answering, show the error.

    Raises:
        ProrlError: the service refuses, or does not answer the first request.
    """
    view = await client.dashboard()
    with Live(picture(view, height=out.height), console=out, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_POLL_S)
            problem: ProrlError | None = None
            try:
                view = await client.dashboard()
            except Retryable as error:
                problem = error
            live.update(picture(view, height=out.height, problem=problem), refresh=True)


def picture(view: DashboardView, *, height: int | None, problem: ProrlError | None = None) -> Group:
    """Render the dashboard of a service.

    Args:
        view: the last dashboard data.
        height: available lines; None means no limit.
        problem: error of the last request, if the data is outdated.
    """
    servers = view.status.model_servers
    parts: list[RenderableType] = [_heading(view, problem), _pools(view), _figures(view)]
    if servers:
        parts.append(servers_table(servers[:8]))
    if view.nodes:
        parts.append(nodes_table(view.nodes[:8]))
    used = 16 + (len(servers[:8]) + 3 if servers else 0) + (len(view.nodes[:8]) + 3 if view.nodes else 0)
    max_jobs = len(view.running) if height is None else max(0, height - used - 4)
    if max_jobs and view.running:
        parts.append(jobs_table(view.running[:max_jobs]))
    return Group(*parts)


def _heading(view: DashboardView, problem: ProrlError | None) -> Text:
    status = view.status
    state = f"paused: {status.paused}" if status.paused else status.state
    style = "bold green" if state == "serving" else "bold yellow"
    text = Text.assemble(
        (f" {state} ", style),
        f"  {status.unfinished} unfinished",
        f"   {status.jobs_with_sandbox}/{status.max_jobs_with_sandbox} jobs with a sandbox",
        (f"   up {status.uptime_s:.0f} s   {status.version}", "dim"),
    )
    if problem is not None:
        text.append(f"   {plain(problem.message).plain}", style="bold red")
    return text


def _pools(view: DashboardView) -> Table:
    grid = pools_grid(view.status)
    use = view.sandboxes
    memory = (
        f"; {filesize.decimal(use.busy_bytes or 0)} busy, {filesize.decimal(use.warm_bytes or 0)} warm"
        if use.largest_bytes is not None
        else ""
    )
    counts = f"{use.busy} busy, {use.warm} warm, {use.starting} starting, {use.failed} failed"
    grid.add_row("SANDBOXES", "", counts + memory)
    return grid


def _figures(view: DashboardView) -> Table:
    status, last = view.status, view.history[-6:]
    finished = sum(bucket.done + bucket.failed + bucket.cancelled for bucket in last)
    lines = [
        f"{finished} jobs, {sum(bucket.sampled for bucket in last)} tokens per minute",
        "".join(_spark(view.history[-_SPARK:])),
        ", ".join(f"{n} {name}" for name, n in status.finished.items()),
        "no reward yet" if view.reward_mean is None else f"mean reward {view.reward_mean:.3g}",
        *_hits(view),
    ]
    failed = [f"{n} {kind}" for kind, n in status.failures.items() if n]
    grid = Table.grid(expand=True)
    for ratio in (4, 4, 2):
        grid.add_column(ratio=ratio)
    grid.add_row(
        Panel("\n".join(lines), title="throughput", title_align="left", height=_PANEL),
        Panel(_latency(view), title="seconds: p50, p90, p99", title_align="left", height=_PANEL),
        Panel("\n".join(failed) or "none", title="failures", title_align="left", height=_PANEL),
    )
    return grid


def _hits(view: DashboardView) -> Iterator[str]:
    if (router := view.status.router) is not None:
        rate = router.expected_hit_rate if router.reported_hit_rate is None else router.reported_hit_rate
        if rate is not None:
            yield f"prefix hits {rate:.0%}"


def _spark(history: Sequence[Bucket]) -> Iterator[str]:
    counts = [bucket.done + bucket.failed + bucket.cancelled for bucket in history]
    highest = max([1, *counts])
    return (_BLOCKS[-(-count * (len(_BLOCKS) - 1) // highest)] for count in counts)


def _latency(view: DashboardView) -> RenderableType:
    if not view.latency:
        return "no job has finished yet"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for _ in range(3):
        grid.add_column(justify="right")
    for name, label in _LATENCIES.items():
        if found := view.latency.get(name):
            grid.add_row(label, *(f"{value:.3g}" for value in (found.p50, found.p90, found.p99)))
    return grid
