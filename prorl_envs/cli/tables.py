"""Tables of results, as a trainer's user wants to see them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.console import plain
from prorl_envs.rollout.looking import summarise
from prorl_envs.rollout.types import GroupStatistics, Result, Timings
from prorl_envs.viewer.summary import Summary


def reward_cell(result: Result) -> Text:
    """A sample's reward, or the kind of failure where there is none."""
    return _outcome(summarise(result))


def tokens_of(result: Result) -> tuple[int, int]:
    """(all tokens, sampled tokens) of a result."""
    return sum(len(row.ids) for row in result.rows), sum(sum(row.loss_mask) for row in result.rows)


def _outcome(one: Summary) -> Text:
    if one.failure is not None:
        return Text(plain(one.failure).plain, style="yellow")
    if one.reward is None:
        return Text(plain(one.state).plain, style="yellow")
    return Text(f"{one.reward:g}", style="green" if one.reward > 0 else "red")


def samples_table(summaries: Iterable[Summary]) -> Table:
    """One row per sample."""
    table = Table(
        title="samples", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in ("job", "reward", "ended"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "tokens", "sampled", "init/run/eval s", "drift"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in summaries:
        table.add_row(
            plain(one.job_id),
            _outcome(one),
            plain(f"failed in {one.failed_in}" if one.failed_in else one.stop_reason or ""),
            str(one.turns),
            str(one.tokens),
            str(one.sampled),
            "/".join(f"{seconds:.1f}" for seconds in (one.init_s, one.run_s, one.eval_s)),
            str(one.drift),
        )
    return table


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else "-"


def _rewards(samples: Iterable[Result]) -> Text:
    """One mark per sample: its reward, or a cross where there is none."""
    marks = [reward_cell(r) if r.reward is not None else Text("x", style="yellow") for r in samples]
    return Text(" ").join(marks)


def tasks_table(results: Iterable[Result]) -> Table:
    """One row per task: the reward of each sample, and means over the samples."""
    caption = "x: no reward; turns and seconds (active) are means over the samples"
    table = Table(
        title="tasks",
        title_justify="left",
        caption=caption,
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("task", overflow="fold")
    table.add_column("rewards", no_wrap=True)
    for name in ("turns", "tokens", "init/run/eval s", "drift"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("failures", no_wrap=True)
    ordered = sorted(results, key=lambda r: (r.environment, r.task_id, r.group_id, r.sample))
    family = ""
    for _, group in groupby(ordered, key=lambda r: (r.environment, r.group_id)):
        samples = list(group)
        if samples[0].environment != family:
            family = samples[0].environment
            table.add_row(Text(plain(family).plain, style="bold"))
        times: list[Timings] = [r.timings for r in samples]
        kinds = Counter(r.failure.kind.value for r in samples if r.failure)
        table.add_row(
            plain(samples[0].task_id),
            _rewards(samples),
            _mean([sum(len(row.turns) for row in r.rows) for r in samples if r.trajectory]),
            str(sum(tokens_of(r)[0] for r in samples)),
            "/".join(
                _mean(seconds)
                for seconds in zip(*((t.init_s, t.run_s, t.eval_s) for t in times), strict=True)
            ),
            str(sum(r.trajectory.drift for r in samples if r.trajectory)),
            ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
        )
    return table


def groups_table(groups: Iterable[GroupStatistics]) -> Table:
    """What a trainer sees of each group."""
    title = "groups, as a trainer sees them"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    for name in ("samples", "with reward", "mean", "std"):
        table.add_column(name, justify="right")
    table.add_column("informative")
    for g in groups:
        scored = [r for r in g.rewards if r is not None]
        table.add_row(
            plain(g.group_id),
            str(len(g.rewards)),
            str(len(scored)),
            "-" if g.mean is None else f"{g.mean:.3f}",
            "-" if g.std is None else f"{g.std:.3f}",
            Text("yes", style="green") if g.informative else Text("no", style="dim"),
        )
    return table
