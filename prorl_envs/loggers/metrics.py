"""Metrics of a run, by name, as pure functions of result summaries."""

from collections.abc import Collection, Mapping
from statistics import fmean

from prorl_envs.runs.statistics import RunSummary, Statistics, by_environment, statistics_of
from prorl_envs.viewer.summary import Summary

_TIMINGS = ("queued_s", "init_s", "run_s", "eval_s", "model_s", "tools_s")


def sample_metrics(summary: Summary) -> dict[str, float]:
    """Return the metrics of one result: `sample/...`. A result without a reward has no `sample/reward`."""
    names = ("turns", "tokens", "sampled", "attempts", *_TIMINGS)
    found = {f"sample/{name}": float(getattr(summary, name)) for name in names}
    found["sample/failed"] = float(summary.failure is not None)
    if summary.reward is not None:
        found["sample/reward"] = summary.reward
    return found


def run_metrics(summaries: Collection[Summary]) -> dict[str, float]:
    """Return the metrics of all results so far, and of each environment: `environments/NAME/...`."""
    found = _metrics(statistics_of(summaries), summaries)
    for name, statistics in by_environment(summaries).items():
        own = [one for one in summaries if one.environment == name]
        found.update(_prefixed(f"environments/{name}/", _metrics(statistics, own)))
    return found


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
    found = {name: float(value) for name, value in values.items() if value is not None}
    found.update((f"pass_at/{k}", value) for k, value in statistics.pass_at.items())
    found["failures/all"] = float(sum(statistics.failures.values()))
    found.update((f"failures/{kind}", float(count)) for kind, count in statistics.failures.items())
    if summaries:
        found.update((name, fmean(getattr(one, name) for one in summaries)) for name in _TIMINGS)
    return found


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}
