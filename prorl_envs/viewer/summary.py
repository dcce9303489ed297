"""What a list shows of a result: read from its JSON without building what is large in it."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    version: Literal[1] = 1
    cursor: int = 0
    batch_id: str | None = None
    stop_reason: str | None = None
    failure: _Failure | None = None
    trajectory: _Row | None = None
    forks: Sequence[_Row] = ()
    timings: _Timings = msgspec.field(default_factory=_Timings)
    attempts: int = 1


class _Ordered(_Stored, kw_only=True):
    """The same where nothing may be missing: else it may have been in what was left out."""

    cursor: int
    batch_id: str | None
    stop_reason: str | None
    failure: _Failure | None
    trajectory: _Row | None
    forks: Sequence[_Row]
    timings: _Timings
    attempts: int


class _BareRow(_Row, kw_only=True):
    ids: Raw = Raw(b"[]")


class _Body(_Ordered, kw_only=True):
    """What a store keeps as JSON: without a cursor, and without the arrays of the trajectory."""

    cursor: int = 0
    trajectory: _BareRow | None


_DECODER = msgspec.json.Decoder(_Stored)
_ORDERED = msgspec.json.Decoder(_Ordered)
_BODY = msgspec.json.Decoder(_Body)
_NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def summary_of(line: bytes) -> Summary:
    """The summary of a result.

    Args:
        line: the result as JSON.

    Raises:
        InputError: it is none.
    """
    short = _shortened(line)
    if short is not None:
        with contextlib.suppress(*_NOT_JSON):
            ordered = _ORDERED.decode(short)
            rows = _rows(ordered)
            return summary_from(ordered, rows, sum(int(bytes(row.ids)[1:-1]) for row in rows))
    try:
        stored = _DECODER.decode(line)
    except _NOT_JSON as error:
        raise InputError(f"not a rollout result: {error}") from error
    rows = _rows(stored)
    return summary_from(stored, rows, sum(_length(row.ids) for row in rows))


def summary_of_body(body: bytes, cursor: int, tokens: int) -> Summary:
    """The summary of a result that a store keeps.

    Args:
        body: its JSON, without its cursor and the arrays of its trajectory.
        cursor: its own; `tokens`: of all rows.

    Raises:
        InputError: it is none.
    """
    try:
        stored = _BODY.decode(_shortened(body) or body)
    except _NOT_JSON:  # of another order; or none
        try:
            stored = _BODY.decode(body)
        except _NOT_JSON as error:
            raise InputError(f"not a rollout result: {error}") from error
    stored.cursor = cursor
    return summary_from(stored, _rows(stored), tokens)


def _rows(stored: _Stored) -> list[_Row]:
    return [*stored.forks, *([stored.trajectory] if stored.trajectory else [])]


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
        turns=sum([len(row.turns) for row in rows]),
        tokens=tokens,
        sampled=sum([turn.end - turn.start for row in rows for turn in row.turns]),
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


_HEAD, _TAIL = b',"components":{', b',"trajectory":'
_IDS, _MASK, _LOGPROBS = b'{"ids":[', b'],"loss_mask":[', b'],"logprobs":['


def _shortened(line: bytes) -> bytes | None:
    """A result without what is large in it: the grade, the conversation, the numbers of each token; in the
    place of `ids` stands how many there are. None where it is not written as this package writes it.

    What is searched for holds a quote that nothing escapes, so it is never inside a string. Where one of them
    belongs to an inner object, what is left is no JSON, or has not all fields: then it is read as a whole.
    """
    head = line.find(_HEAD)
    at = line.find(_TAIL, head)
    if head < 0 or at < 0:
        return None
    parts = [line[:head]]
    while (start := line.find(_IDS, at)) >= 0:
        start += len(_IDS)
        mask = _after(line, _MASK, start)
        logprobs = _after(line, _LOGPROBS, mask)
        end = _end(line, logprobs)
        if end < 0:
            return None
        # The mask is as long as the ids, and written shorter.
        count = 0 if line.startswith(b"]", mask) else line.count(b",", mask, logprobs - len(_LOGPROBS)) + 1
        parts += [line[at:start], b"%d" % count]
        at = end
    parts.append(line[at:])
    return b"".join(parts)


def _after(line: bytes, name: bytes, start: int) -> int:
    """Where the array `name` begins, which follows the one that begins at `start`; -1 where it does not."""
    end = _end(line, start)
    return end + len(name) if end >= 0 and line.startswith(name, end) else -1


def _end(line: bytes, start: int) -> int:
    """Where an array of numbers ends that begins at `start`; -1 where there are no numbers alone in it."""
    end = line.find(b"]", start) if start >= 0 else -1
    return end if line.find(b'"', start, end) < 0 else -1
