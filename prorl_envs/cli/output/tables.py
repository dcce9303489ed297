"""Tables of results."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from prorl_envs.cli.output.console import plain
from prorl_envs.cli.output.fitted_table import FittedTable, plain_table
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.rollout.api.types import Result
from prorl_envs.runs.statistics import RunSummary, Statistics


def tokens_of(result: Result) -> tuple[int, int]:
    """Return (all tokens, sampled tokens) of a result."""
    return sum(len(row.ids) for row in result.rows), sum(sum(row.loss_mask) for row in result.rows)


def outcome_cell(summary: Summary) -> Text:
    """Return the reward of a sample; without a reward, the kind of its failure or its state."""
    if summary.failure is not None:
        return Text(plain(summary.failure).plain, style="yellow")
    if summary.reward is None:
        return Text(plain(summary.state).plain, style="yellow")
    return Text(f"{summary.reward:g}", style="green" if summary.reward > 0 else "red")


def samples_table(summaries: Iterable[Summary]) -> FittedTable:
    """Return a table with one row per sample."""
    numbers = ("turns", "tokens", "sampled", "init/run/eval s", "drift")
    table = plain_table("job", "reward", "ended", *numbers, title="samples", numbers=numbers)
    for sample in summaries:
        table.add_row(
            plain(sample.job_id),
            outcome_cell(sample),
            plain(f"failed in {sample.failed_in}" if sample.failed_in else sample.stop_reason or ""),
            str(sample.turns),
            str(sample.tokens),
            str(sample.sampled),
            "/".join(f"{seconds:.1f}" for seconds in (sample.init_s, sample.run_s, sample.eval_s)),
            str(sample.drift),
        )
    return FittedTable(table)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else "-"


def _rewards(samples: Iterable[Summary]) -> Text:
    """Return one mark per sample: its reward, or `x` without a reward."""
    missing = Text("x", style="yellow")
    return Text(" ").join(missing if sample.reward is None else outcome_cell(sample) for sample in samples)


def tasks_table(ordered: Iterable[Summary], limit: int) -> FittedTable:
    """Return a table with one row per task: the reward of each sample, and means over the samples.

    Args:
        ordered: summaries, sorted by environment, group and sample.
        limit: maximum tasks; the caption gives the number of omitted tasks.
    """
    groups = [list(group) for _, group in groupby(ordered, key=lambda s: (s.environment, s.group_id))]
    omitted = f"; {len(groups) - limit} more tasks" if len(groups) > limit else ""
    numbers = ("turns", "tokens", "init/run/eval s", "drift")
    names = ("task", "rewards", *numbers, "failures")
    table = plain_table(*names, title="tasks", numbers=numbers, unwrapped=["failures"])
    table.caption = f"x: no reward; turns and seconds (active) are means over the samples{omitted}"
    environment = ""
    for samples in groups[:limit]:
        if samples[0].environment != environment:
            environment = samples[0].environment
            table.add_row(Text(plain(environment).plain, style="bold"))
        table.add_row(*_task_row(samples))
    return FittedTable(table)


def _task_row(samples: Sequence[Summary]) -> tuple[Text | str, ...]:
    kinds = Counter(sample.failure for sample in samples if sample.failure)
    seconds = zip(*((sample.init_s, sample.run_s, sample.eval_s) for sample in samples), strict=True)
    return (
        plain(samples[0].task_id),
        _rewards(samples),
        _mean([sample.turns for sample in samples if sample.rows]),
        str(sum(sample.tokens for sample in samples)),
        "/".join(map(_mean, seconds)),
        str(sum(sample.drift for sample in samples)),
        _failures(kinds),
    )


def _failures(kinds: Mapping[str, int]) -> str:
    """Return the number of failures of each kind, one kind per line."""
    return "\n".join(f"{n} {plain(kind).plain}" for kind, n in kinds.items())


def statistics_table(summary: RunSummary) -> FittedTable:
    """Return a table of a run's statistics: a row per environment; with several, also a row for all."""
    title = plain(f"summary of the model {summary.model}" if summary.model else "summary")
    passes = sorted(summary.overall.pass_at)
    scores = ("tasks", "results", "reward", *(f"pass@{k}" for k in passes))
    numbers = (*scores, "turns", "tokens", "sampled", "failures")
    table = plain_table("environment", *numbers, title=title, numbers=numbers)
    several = len(summary.environments) > 1
    for name, statistics in summary.environments.items():
        table.add_row(plain(name), *_statistics_row(statistics, passes))
    if several:
        table.add_row("all", *_statistics_row(summary.overall, passes), style="bold")
    rate = f", {summary.sampled_tokens_per_s:.0f} sampled tokens/s" if summary.sampled_tokens_per_s else ""
    table.caption = f"reward: mean and standard error over tasks; {summary.wall_s:.0f} s{rate}"
    return FittedTable(table)


def _statistics_row(statistics: Statistics, passes: Sequence[int]) -> tuple[str, ...]:
    error = statistics.standard_error
    mean = "-" if statistics.mean_reward is None else f"{statistics.mean_reward:.3f}"
    return (
        str(statistics.tasks),
        str(statistics.results),
        mean if error is None else f"{mean} ± {error:.3f}",
        *(f"{statistics.pass_at[k]:.3f}" if k in statistics.pass_at else "-" for k in passes),
        f"{statistics.turns:.1f}",
        str(statistics.tokens),
        str(statistics.sampled_tokens),
        _failures(statistics.failures) or "0",
    )
