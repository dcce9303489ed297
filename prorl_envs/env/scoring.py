"""Conversion of the results of a task's checks to its grade."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import Field

from prorl_envs.env.base import Grade
from prorl_envs.env.columns import RowModel
from prorl_envs.tools.types import JsonObject


class Scoring(StrEnum):
    """Rule that turns checks into a reward: all or nothing, or the weighted share that passed."""

    ALL = "all"
    WEIGHTED = "weighted"


class CheckModel(RowModel):
    """Common fields of the checks of all families.

    Args:
        name: name in the evidence; by default position and type of the check.
        weight: weight of the check for weighted scoring, > 0.
    """

    name: str = Field(default="", max_length=100)
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Verdict and observations (JSON, bounded) of one check.

    Args:
        share: share of the check that passed, in [0, 1], if it is more precise than `passed`.
    """

    name: str
    passed: bool
    weight: float = 1.0
    share: float | None = None
    detail: JsonObject = field(default_factory=dict)


def score(results: Sequence[CheckResult], scoring: Scoring) -> Grade:
    """Return the grade of an episode: reward in [0, 1], one component and one line of evidence per check.

    Args:
        results: at least one.
        scoring: all-or-nothing, or sum of passed weights over sum of weights.
    """
    shares = [float(r.passed) if r.share is None else r.share for r in results]
    passed = sum(result.weight * share for result, share in zip(results, shares, strict=True))
    share = passed / sum(result.weight for result in results)
    reward = share if scoring is Scoring.WEIGHTED else float(all(result.passed for result in results))
    checks = [{"name": r.name, "passed": r.passed, "weight": r.weight, **r.detail} for r in results]
    return Grade(
        reward=reward,
        components={result.name: share for result, share in zip(results, shares, strict=True)},
        evidence={"scoring": scoring.value, "checks": checks},
    )


def check_names(checks: Sequence[CheckModel], kinds: Sequence[str]) -> list[str]:
    """Return unique names for a task's checks: their own, or `<position>-<kind>`."""
    names = [
        check.name or f"{number}-{kind}"
        for number, (check, kind) in enumerate(zip(checks, kinds, strict=True), start=1)
    ]
    if len(set(names)) != len(names):
        raise ValueError("two checks have the same name")
    return names
