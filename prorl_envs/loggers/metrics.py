"""Metrics of a run by name. Pure functions of result summaries."""

from collections.abc import Collection, Mapping
from statistics import fmean

from prorl_envs.rollout.api.summary import Summary
from prorl_envs.runs.statistics import RunSummary, Statistics, by_environment, statistics_of

_TIMINGS = ("queued_s", "init_s", "run_s", "eval_s", "model_s", "tools_s")


def sample_metrics(summary: Summary) -> dict[str, float]:
    """Return the metrics of one result, `sample/...`. A result without a reward has no `sample/reward`."""
    names = ("turns", "tokens", "sampled", "attempts", *_TIMINGS)
    metrics = {f"sample/{name}": float(getattr(summary, name)) for name in names}
    metrics["sample/failed"] = float(summary.failure is not None)
    if summary.reward is not None:
        metrics["sample/reward"] = summary.reward
    return metrics


def run_metrics(summaries: Collection[Summary]) -> dict[str, float]:
    """Return the metrics of all results so far, and of each environment, `environments/NAME/...`."""
    metrics = _metrics(statistics_of(summaries), summaries)
    for name, statistics in by_environment(summaries).items():
        of_environment = [summary for summary in summaries if summary.environment == name]
        metrics.update(_prefixed(f"environments/{name}/", _metrics(statistics, of_environment)))
    return metrics


def session_metrics(summary: RunSummary) -> dict[str, float]:
    """Return the metrics of the finished session."""
    return {"wall_s": summary.wall_s, "sampled_tokens_per_s": summary.sampled_tokens_per_s}


def _metrics(statistics: Statistics, summaries: Collection[Summary]) -> dict[str, float]:
    names = (
        "tasks",
        "results",
        "scored",
        "mean_reward",
        "standard_error",
        "turns",
        "tokens",
        "sampled_tokens",
    )
    values = {name: getattr(statistics, name) for name in names}
    metrics = {name: float(value) for name, value in values.items() if value is not None}
    metrics.update((f"pass_at/{k}", value) for k, value in statistics.pass_at.items())
    metrics["failures/all"] = float(sum(statistics.failures.values()))
    metrics.update((f"failures/{kind}", float(count)) for kind, count in statistics.failures.items())
    if summaries:
        metrics.update((name, fmean(getattr(summary, name) for summary in summaries)) for name in _TIMINGS)
    return metrics


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}
