"""An attempt's account as bytes, and back. Token ids and log-probabilities arrive exactly as they were."""

import json
from array import array

from pydantic import TypeAdapter

from prorl_envs.env.base import Grade
from prorl_envs.rollout.episode import Account, Attempt, Spent
from prorl_envs.rollout.nodes.messages import Report
from prorl_envs.rollout.types import StopReason, Trajectory, TurnRecord

_TURNS = TypeAdapter(list[TurnRecord])


def short_report(attempt: Attempt) -> Report:
    """What the head needs to know of an attempt that goes on."""
    return Report(attempt.prompt is not None, attempt.stop_reason, *attempt.spent())


def whole_report(attempt: Attempt) -> Report:
    """All of it."""
    account = attempt.account()
    said: dict[str, object] = {"messages": account.messages, "tools": account.tools}
    if grade := account.grade:
        said["grade"] = {
            "reward": grade.reward,
            "components": dict(grade.components),
            "evidence": grade.evidence,
        }
    report = Report(account.prompted, account.stop_reason, *account.spent)
    report.text = json.dumps(said).encode()  # ASCII escapes, and integers of any size
    if trajectory := account.trajectory:
        report.ids = array("i", trajectory.ids).tobytes()
        report.mask = array("b", trajectory.loss_mask).tobytes()
        report.logprobs = array("d", trajectory.logprobs).tobytes()
        report.turns = _TURNS.dump_json(trajectory.turns)
        report.drift, report.exact = trajectory.drift, trajectory.exact
    return report


def account_of(report: Report) -> Account:
    """What a node told.

    Raises:
        ValueError: it makes no sense.
    """
    said = json.loads(report.text) if report.text else {}
    grade = said.get("grade")
    return Account(
        prompted=report.prompted,
        messages=said.get("messages", ()),
        tools=said.get("tools", ()),
        trajectory=_trajectory(report) if report.turns else None,
        stop_reason=StopReason(report.stop_reason) if report.stop_reason else None,
        grade=Grade(**grade) if grade else None,
        spent=Spent(report.model_s, report.tools_s, report.held_s),
    )


def _numbers(packed: bytes) -> list[float]:
    numbers: array[float] = array("d", packed)
    return numbers.tolist()


def _trajectory(report: Report) -> Trajectory:
    return Trajectory(
        ids=array("i", report.ids).tolist(),
        loss_mask=array("b", report.mask).tolist(),
        logprobs=_numbers(report.logprobs),
        turns=_TURNS.validate_json(report.turns),
        drift=report.drift,
        exact=report.exact,
    )
