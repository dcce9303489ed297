"""Runs as a table, a picture and a file of numbers."""

import csv
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

#: A line of the records; below, usually of an evaluation on the held-out tasks.
type Look = dict[str, Any]
#: Records of each run, by (arm, seed).
type Runs = Mapping[tuple[str, int], list[Look]]

_COLOURS = {"trained": "#1f6f8b", "frozen": "#9a9a9a"}
#: Number of steps averaged for each point of the curve of rollouts.
_SMOOTH = 5
_OTHERS = ("#c8553d", "#588157", "#8d6a9f", "#bc8a00")


def table(runs: Runs) -> Table:
    """Format each run's first and last evaluation on the held-out tasks, with standard errors over the tasks,
    and the mean of an arm's seeds."""
    shown = Table(title="mean reward on held-out tasks", title_justify="left")
    levels = sorted({level for records in runs.values() for level in _last(records).get("by_level", {})})
    for name in (
        "run",
        "seed",
        "steps",
        "first",
        "last",
        *(f"level {level}" for level in levels),
        "gap",
        "stale",
    ):
        shown.add_column(name, justify="left" if name == "run" else "right")
    for (arm, seed), records in runs.items():
        first, last = _first(records), _last(records)
        if not last:
            continue
        trained = _steps(records)
        apart = [_number(last["by_level"].get(level)) for level in levels]
        gap = max((line["logprob_gap"] for line in trained), default=None)
        stale = str(sum(line["stale"] for line in trained))
        shown.add_row(
            arm,
            str(seed),
            str(last["step"]),
            _with_error(first["reward"], first.get("stderr")),
            _with_error(last["reward"], last.get("stderr")),
            *apart,
            "" if gap is None else f"{gap:.0e}",
            stale,
        )
    for arm, ends in _by_arm(runs).items():
        lasts = [last for _, last in ends]
        if len(ends) > 1 and len({last["step"] for last in lasts}) == 1:  # avoids the mean of an empty list
            means = [_pooled(looks) for looks in ([first for first, _ in ends], lasts)]
            apart = _means_by_level(lasts, levels)
            shown.add_row(arm, "all", str(lasts[0]["step"]), *means, *apart, "", "")
    return shown


def _by_arm(runs: Runs) -> dict[str, list[tuple[Look, Look]]]:
    """Return the first and last evaluation of each run that has any."""
    arms: dict[str, list[tuple[Look, Look]]] = {}
    for (arm, _), records in runs.items():
        if last := _last(records):
            arms.setdefault(arm, []).append((_first(records), last))
    return arms


def _pooled(looks: Sequence[Look]) -> str:
    """Return the mean of evaluations of equal size, and its standard error."""
    rewards = [look["reward"] for look in looks]
    errors = [look["stderr"] for look in looks if look.get("stderr") is not None]
    if None in rewards:
        return ""
    whole = len(errors) == len(looks)
    return _with_error(
        sum(rewards) / len(rewards), sqrt(sum(error**2 for error in errors)) / len(errors) if whole else None
    )


def _means_by_level(looks: Sequence[Look], levels: Sequence[str]) -> list[str]:
    columns = [[look["by_level"].get(level) for look in looks] for level in levels]
    return ["" if None in values else _number(sum(values) / len(values)) for values in columns]


def save_numbers(runs: Runs, path: Path) -> None:
    """Write a line for each evaluation on the held-out tasks, as CSV."""
    levels = sorted({level for records in runs.values() for level in _last(records).get("by_level", {})})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["run", "seed", "step", "reward", "stderr", *(f"level_{level}" for level in levels), "episodes"]
        )
        for (arm, seed), records in runs.items():
            for line in records:
                if line["kind"] == "held_out":
                    apart = [_number(line["by_level"].get(level)) for level in levels]
                    writer.writerow(
                        [
                            arm,
                            seed,
                            line["step"],
                            _number(line["reward"]),
                            _number(line.get("stderr")),
                            *apart,
                            line["scored"],
                        ]
                    )


def save_steps(runs: Runs, path: Path) -> None:
    """Write a line for each step of the trained runs, as CSV: the mean reward of its rollouts, and their
    other numbers."""
    counted = ("reward", "logprob_gap", "staleness", "frac_reward_zero_std", "drift", "drifted")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "seed", "step", *counted])
        for (arm, seed), records in runs.items():
            for line in _steps(records):
                numbers = [f"{line[name]:.3g}" if name in line else "" for name in counted]
                writer.writerow([arm, seed, line["step"], *numbers])


def draw_steps(runs: Runs, path: Path) -> None:
    """Plot the mean reward of each step's rollouts: dots, and a line of means over the last few steps."""
    pyplot = _pyplot()
    trained = {run: _steps(records) for run, records in runs.items() if _steps(records)}
    arms = list(dict.fromkeys(arm for arm, _ in trained))
    figure, pane = pyplot.subplots(figsize=(6.2, 3.4))
    for (arm, seed), lines in trained.items():
        colour = _colour(arm, arms)
        steps, rewards = [line["step"] for line in lines], [line["reward"] for line in lines]
        means = [mean(rewards[max(0, at - _SMOOTH + 1) : at + 1]) for at in range(len(rewards))]
        pane.plot(steps, rewards, ".", color=colour, alpha=0.3, markersize=4)
        first = seed == min(other for own, other in trained if own == arm)
        pane.plot(steps, means, color=colour, linewidth=1.8, alpha=0.9, label=arm if first else None)
    pane.set_title(f"rollouts trained on, mean of {_SMOOTH} steps", fontsize=10)
    pane.set_ylabel("mean reward")
    _finish(pane)
    pane.set_ylim(0, 1)
    pane.legend(frameon=False, loc="upper left")
    _save(figure, path)


def draw(runs: Runs, path: Path) -> None:
    """Plot the curves: all tasks, and each level; a thin line per seed, a thick one for their mean."""
    pyplot = _pyplot()
    levels = sorted({level for records in runs.values() for level in _last(records).get("by_level", {})})
    figure, panes = pyplot.subplots(1, 1 + len(levels), figsize=(3.1 * (1 + len(levels)), 3), sharey=True)
    arms = list(dict.fromkeys(arm for arm, _ in runs))
    for pane, level in zip(panes, [None, *levels], strict=True):
        for arm in arms:
            colour = _colour(arm, arms)
            curves = [_points(records, level) for (own, _), records in runs.items() if own == arm]
            for points in curves:
                pane.plot(*zip(*points, strict=True), color=colour, alpha=0.35, linewidth=1)
            pane.plot(*zip(*_mean(curves), strict=True), color=colour, linewidth=2.2, label=arm)
        pane.set_title("held-out tasks" if level is None else f"level {level}", fontsize=10)
        _finish(pane)
        pane.set_ylim(0, 1)
    panes[0].set_ylabel("mean reward")
    panes[0].legend(frameon=False, loc="upper left")
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "prorl-envs"  # the same numbers yield the same picture
    from matplotlib import pyplot

    return pyplot


def _colour(arm: str, arms: Sequence[str]) -> str:
    others = [one for one in arms if one not in _COLOURS]
    return _COLOURS.get(arm) or _OTHERS[others.index(arm) % len(_OTHERS)]


def _finish(pane: Any) -> None:
    pane.set_xlabel("step")
    pane.grid(alpha=0.25)
    pane.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)


def _steps(records: Sequence[Look]) -> list[Look]:
    return [line for line in records if line["kind"] == "train"]


def _points(records: Sequence[dict[str, Any]], level: str | None) -> list[tuple[int, float]]:
    looks = [line for line in records if line["kind"] == "held_out"]
    values = [
        (line["step"], line["reward"] if level is None else line["by_level"].get(level)) for line in looks
    ]
    return [(step, value) for step, value in values if value is not None]


def _mean(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return their mean at the steps that all of them have."""
    by_step = [dict(points) for points in curves]
    steps = sorted(set.intersection(*(set(points) for points in by_step))) if by_step else []
    return [(step, sum(points[step] for points in by_step) / len(by_step)) for step in steps]


def _first(records: Sequence[Look]) -> Look:
    return next((line for line in records if line["kind"] == "held_out"), {})


def _last(records: Sequence[Look]) -> Look:
    return _first(list(reversed(records)))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value) if error is None else f"{_number(value)} ± {error:.3f}"
