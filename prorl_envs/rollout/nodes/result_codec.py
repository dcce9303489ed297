"""Codec of attempt reports. Token ids and log-probabilities arrive unchanged."""

import json
from array import array

from pydantic import TypeAdapter

from prorl_envs.env.base import Grade
from prorl_envs.rollout.api.types import StopReason, Trajectory, TurnRecord
from prorl_envs.rollout.episode.job import Attempt, AttemptReport, Spent
from prorl_envs.rollout.nodes.messages import Report, SampledRow

_TURNS = TypeAdapter(list[TurnRecord])


def short_report(attempt: Attempt) -> Report:
    """Return the report of an unfinished attempt, without messages and tokens."""
    return Report(attempt.prompt is not None, attempt.stop_reason, *attempt.spent())


def whole_report(attempt: Attempt) -> Report:
    """Return the complete report of an attempt."""
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
    report.rows = [_row(row) for row in account.rows]
    report.unfinished_answers = [_row(row) for row in account.unfinished_answers]
    return report


def account_of(report: Report) -> AttemptReport:
    """Decode a node's report.

    Raises:
        ValueError: the report is invalid.
    """
    said = json.loads(report.text) if report.text else {}
    grade = said.get("grade")
    rows = [_trajectory(row) for row in report.rows]
    return AttemptReport(
        prompted=report.prompted,
        messages=said.get("messages", ()),
        tools=said.get("tools", ()),
        trajectory=rows[-1] if rows else None,
        forks=tuple(rows[:-1]),
        unfinished_answers=tuple(_trajectory(row) for row in report.unfinished_answers),
        stop_reason=StopReason(report.stop_reason) if report.stop_reason else None,
        grade=Grade(**grade) if grade else None,
        spent=Spent(report.model_s, report.tools_s, report.held_s),
    )


def _numbers(packed: bytes) -> list[float]:
    numbers: array[float] = array("d", packed)
    return numbers.tolist()


def _row(row: Trajectory) -> SampledRow:
    return SampledRow(
        ids=array("i", row.ids).tobytes(),
        mask=array("b", row.loss_mask).tobytes(),
        logprobs=array("d", row.logprobs).tobytes(),
        turns=_TURNS.dump_json(row.turns),
        drift=row.drift,
        exact=row.token_exact,
        parent=row.parent,
        shared=row.shared_prefix_len,
    )


def _trajectory(row: SampledRow) -> Trajectory:
    return Trajectory(
        ids=array("i", row.ids).tolist(),
        loss_mask=array("b", row.mask).tolist(),
        logprobs=_numbers(row.logprobs),
        turns=_TURNS.validate_json(row.turns),
        drift=row.drift,
        token_exact=row.exact,
        parent=row.parent,
        shared_prefix_len=row.shared,
    )
