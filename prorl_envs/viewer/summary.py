"""What a list shows of a result: read from its JSON without building what is large in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw, Struct

from prorl_envs.errors import InputError


@dataclass(slots=True, kw_only=True)
class Summary:
    """A result in short. Not to be changed; a frozen one would take several times as long to make.

    Args:
        cursor, job_id, group_id, sample, environment, task_id, batch_id, state, reward, mask_sample,
            stop_reason, attempts: as in the result.
        failure: the kind of failure, or None; `failed_in`: its stage.
        turns: model calls; `tokens`: of all rows of the trajectory; `sampled`: those the policy sampled.
        rows: rows of the trajectory, 1 where nothing forked.
        drift: tokens that a prompt differed by, of all rows.
        queued_s, init_s, run_s, eval_s, model_s, tools_s: as in the result's timings.
    """

    cursor: int = 0
    job_id: str
    group_id: str
    sample: int
    environment: str
    task_id: str
    batch_id: str | None = None
    state: str
    reward: float | None = None
    mask_sample: bool = False
    stop_reason: str | None = None
    failure: str | None = None
    failed_in: str | None = None
    attempts: int = 1
    turns: int = 0
    tokens: int = 0
    sampled: int = 0
    rows: int = 0
    drift: int = 0
    queued_s: float = 0.0
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0


class _Turn(Struct):
    start: int
    end: int


class _Row(Struct):
    ids: Raw
    turns: list[_Turn]
    drift: int = 0


class _Failure(Struct):
    kind: str
    stage: str


class _Timings(Struct):
    queued_s: float = 0.0
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0


class _Stored(Struct):
    """The parts of a result that a summary needs. What is not named is skipped over, not built."""

    job_id: str
    group_id: str
    sample: int
    environment: str
    task_id: str
    state: str
    reward: float | None
    mask_sample: bool
    cursor: int = 0
    batch_id: str | None = None
    stop_reason: str | None = None
    failure: _Failure | None = None
    trajectory: _Row | None = None
    forks: Sequence[_Row] = ()
    timings: _Timings = msgspec.field(default_factory=_Timings)
    attempts: int = 1


_DECODER = msgspec.json.Decoder(_Stored)


def summary_of(line: bytes) -> Summary:
    """The summary of a result.

    Args:
        line: the result as JSON.

    Raises:
        InputError: it is none.
    """
    try:
        stored = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a rollout result: {error}") from error
    rows = [*stored.forks, *([stored.trajectory] if stored.trajectory else [])]
    return summary_from(stored, rows, sum(_length(row.ids) for row in rows))


def summary_from(result: Any, rows: Sequence[Any], tokens: int) -> Summary:
    """The summary of what has a result's fields, whoever read it.

    Args:
        result: a result, or the parts of one that a summary needs.
        rows: all rows of its trajectory.
        tokens: of all rows.
    """
    timings, failure = result.timings, result.failure
    return Summary(
        cursor=result.cursor,
        job_id=result.job_id,
        group_id=result.group_id,
        sample=result.sample,
        environment=result.environment,
        task_id=result.task_id,
        batch_id=result.batch_id,
        state=str(result.state),
        reward=result.reward,
        mask_sample=result.mask_sample,
        stop_reason=str(result.stop_reason) if result.stop_reason else None,
        failure=str(failure.kind) if failure else None,
        failed_in=str(failure.stage) if failure else None,
        attempts=result.attempts,
        turns=sum(len(row.turns) for row in rows),
        tokens=tokens,
        sampled=sum(turn.end - turn.start for row in rows for turn in row.turns),
        rows=len(rows),
        drift=sum(row.drift for row in rows),
        queued_s=timings.queued_s,
        init_s=timings.init_s,
        run_s=timings.run_s,
        eval_s=timings.eval_s,
        model_s=timings.model_s,
        tools_s=timings.tools_s,
    )


def _length(numbers: Raw) -> int:
    """How many numbers a JSON array has: counting commas costs a fraction of building them."""
    text = bytes(numbers)
    return text.count(b",") + 1 if text.strip(b"[] \t\r\n") else 0
