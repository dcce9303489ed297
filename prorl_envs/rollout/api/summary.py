"""Summaries of stored results, and the search of their texts. Neither uses the tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import Result

#: Longest text of a failure in a summary, in characters.
MAX_PROBLEM = 200
#: Longest search text, in characters.
MAX_QUERY = 1000
#: Arrays of a trajectory with one value per token. Stores keep them separately.
ARRAYS = ("ids", "loss_mask", "logprobs")


@dataclass(slots=True, kw_only=True)
class _Named:
    """Fields that a result and its summary have in common."""

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
    attempts: int = 1


@dataclass(slots=True, kw_only=True)
class Summary(_Named):
    """Summary of a result. Treat it as read-only; a frozen class would take several times as long to create.
    Beside the fields below, it has those of the result's identity, outcome and timings under the same names.

    Args:
        failure: kind of the failure, or None.
        failed_in: stage of the failure, or None.
        problem: start of the failure's message, or None.
        turns: number of model calls.
        tokens: number of tokens in all rows of the trajectory.
        sampled: number of these tokens that the policy sampled.
        rows: number of rows of the trajectory, 1 if there is no fork.
        drift: sum of the drift of all rows, in tokens.
    """

    failure: str | None = None
    failed_in: str | None = None
    problem: str | None = None
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


class Found(NamedTuple):
    """Outcome of one step of a search.

    Args:
        numbers: numbers of the results that contain the text.
        next: number of the first result that has not been searched.
    """

    numbers: list[int]
    next: int


class _Turn(Struct):
    start: int
    end: int


class _Row(Struct):
    turns: list[_Turn]
    ids: Raw = Raw(b"[]")  # a store has them in another column
    drift: int = 0


class _Failure(Struct):
    kind: str
    stage: str
    message: str = ""


class _Timings(Struct):
    queued_s: float = 0.0
    init_s: float = 0.0
    run_s: float = 0.0
    eval_s: float = 0.0
    model_s: float = 0.0
    tools_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Stored(_Named):
    """Parts of a result that a summary needs. The decoder skips other fields."""

    reward: float | None
    mask_sample: bool
    version: Literal[2] = 2
    failure: _Failure | None = None
    trajectory: _Row | None = None
    forks: Sequence[_Row] = ()
    timings: _Timings = field(default_factory=_Timings)


_NAMED, _TIMES = [each.name for each in fields(_Named)], _Timings.__struct_fields__
_DECODER = msgspec.json.Decoder(_Stored)


def summary_of(line: bytes) -> Summary:
    """Return the summary of a result.

    Args:
        line: the result as JSON.

    Raises:
        InputError: the JSON is not a result.
    """
    stored = _decoded(line)
    rows = _rows(stored)
    return _summary_from(stored, rows, sum(_length(row.ids) for row in rows))


def summary_of_body(body: bytes, cursor: int, tokens: int) -> Summary:
    """Return the summary of a result in a store.

    Args:
        body: the result as JSON, without the cursor and the arrays of the trajectory.
        cursor: cursor of the result.
        tokens: number of tokens in all rows of the trajectory.

    Raises:
        InputError: the JSON is not a result.
    """
    stored = _decoded(body)
    stored.cursor = cursor
    return _summary_from(stored, _rows(stored), tokens)


def summarise(result: Result) -> Summary:
    """Return the summary of a result. It is equal to `summary_of` of the result's JSON."""
    rows = result.rows
    return _summary_from(result, rows, sum(len(row.ids) for row in rows))


def body_of(result: Result) -> bytes:
    """Return a result as JSON in the format of a store, which `summary_of_body` reads."""
    return result.model_dump_json(exclude={"cursor": True, "trajectory": set(ARRAYS)}).encode()


def needles(text: str) -> list[bytes]:
    """Return the spellings of a text in JSON: with and without escapes for non-ASCII characters."""
    spellings = (json.dumps(text, ensure_ascii=escaped)[1:-1] for escaped in (False, True))
    return sorted({spelling.encode("utf-8", "replace") for spelling in spellings})


def holds(line: bytes, needles: Sequence[bytes]) -> bool:
    """Return whether the line contains at least one of the needles."""
    return any(needle in line for needle in needles)


def _decoded(result: bytes) -> _Stored:
    try:
        return _DECODER.decode(result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a rollout result: {error}") from error


def _rows(stored: _Stored) -> list[_Row]:
    return [*stored.forks, *([stored.trajectory] if stored.trajectory else [])]


def _summary_from(result: Any, rows: Sequence[Any], tokens: int) -> Summary:
    """Return the summary of an object with a result's fields, or at least those that a summary needs."""
    failure, named = result.failure, {name: getattr(result, name) for name in _NAMED}
    # A `Result` has enumerations there.
    named |= {name: named[name] and str(named[name]) for name in ("state", "stop_reason")}
    return Summary(
        **named,
        **{name: getattr(result.timings, name) for name in _TIMES},
        failure=str(failure.kind) if failure else None,
        failed_in=str(failure.stage) if failure else None,
        problem=failure.message[:MAX_PROBLEM] if failure else None,
        turns=sum([len(row.turns) for row in rows]),
        tokens=tokens,
        sampled=sum([turn.end - turn.start for row in rows for turn in row.turns]),
        rows=len(rows),
        drift=sum(row.drift for row in rows),
    )


def _length(numbers: Raw) -> int:
    """Return the number of values in a JSON array of numbers. Counting commas is faster than decoding."""
    text = bytes(numbers)
    return text.count(b",") + 1 if text.strip(b"[] \t\r\n") else 0
