"""Columns of a table with one row per rollout, and the conversion of results, shared by all formats."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Summary, summarise
from prorl_envs.rollout.api.types import Result
from prorl_envs.runs.statistics import SOLVED

type Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Column:
    """Column of an exported table.

    Args:
        name: name of the column.
        type: type of its values, which may also be None.
        value: returns the value for a result and its summary.
    """

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    value: Callable[[Result, Summary], Value]


def _summary_column(name: str, type_: type[str] | type[int] | type[float] | type[bool]) -> Column:
    return Column(name, type_, lambda _, summary: getattr(summary, name))


def _solved(result: Result) -> bool | None:
    return None if result.reward is None else result.reward >= SOLVED


def _cached_tokens(result: Result) -> int | None:
    """Return the number of prompt tokens in servers' caches; None if a server did not report it."""
    counts = [turn.cached_tokens for row in result.rows for turn in row.turns]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def as_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return a value as JSON text, since its fields differ between environments and cannot be columns."""
    return json.dumps(value, ensure_ascii=False)


COLUMNS: tuple[Column, ...] = (
    _summary_column("job_id", str),
    _summary_column("group_id", str),
    _summary_column("sample", int),
    _summary_column("environment", str),
    _summary_column("task_id", str),
    _summary_column("state", str),
    _summary_column("reward", float),
    Column("solved", bool, lambda result, _: _solved(result)),
    _summary_column("mask_sample", bool),
    _summary_column("stop_reason", str),
    _summary_column("failure", str),
    Column("failure_stage", str, lambda _, summary: summary.failed_in),
    Column("failure_message", str, lambda result, _: result.failure.message if result.failure else None),
    _summary_column("attempts", int),
    _summary_column("turns", int),
    _summary_column("rows", int),
    _summary_column("tokens", int),
    Column("sampled_tokens", int, lambda _, summary: summary.sampled),
    Column("cached_tokens", int, lambda result, _: _cached_tokens(result)),
    _summary_column("drift", int),
    Column(
        "token_exact",
        bool,
        lambda result, _: all(row.token_exact for row in result.rows) if result.rows else None,
    ),
    _summary_column("queued_s", float),
    _summary_column("init_s", float),
    _summary_column("run_s", float),
    _summary_column("eval_s", float),
    _summary_column("model_s", float),
    _summary_column("tools_s", float),
    Column("held_s", float, lambda result, _: result.timings.held_s),
    Column("components", str, lambda result, _: as_json(result.components)),
    Column("metadata", str, lambda result, _: as_json(result.metadata)),
)


def row_of(result: Result) -> dict[str, Value]:
    """Return the row of a result, with a value for each column."""
    summary = summarise(result)
    return {column.name: column.value(result, summary) for column in COLUMNS}


@dataclass(slots=True)
class Written:
    """Outcome of an export.

    Args:
        rollouts: number of written rollouts.
        left_out: number of omitted rollouts, by reason.
    """

    rollouts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


type Located = Iterable[tuple[str, Result]]


def converted[T](results: Located, convert: Callable[[Result], T]) -> Iterator[tuple[str, Result, T]]:
    """Yield each result with its conversion.

    Raises:
        InputError: the messages of a result are not chat messages. The error names the line.
    """
    for where, result in results:
        try:
            yield where, result, convert(result)
        except (LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: messages: not in the chat format: {error!r}", hint="correct or remove the line"
            ) from error
