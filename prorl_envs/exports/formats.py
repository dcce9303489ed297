"""Formats of an export and their writers. Results are read and written one by one."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.exports.atif import atif_of
from prorl_envs.exports.chat import training_messages
from prorl_envs.exports.columns import COLUMNS, Value, as_json, row_of
from prorl_envs.exports.target import new_file, new_folder
from prorl_envs.rollout.api.types import JobId, Result
from prorl_envs.runs.folder import RunDescription


class ExportFormat(StrEnum):
    """Format of an export."""

    CSV = "csv"
    PARQUET = "parquet"
    HF = "hf"
    SFT = "sft"
    ATIF = "atif"


@dataclass(slots=True)
class Written:
    """Outcome of an export.

    Args:
        rollouts: number of rollouts written.
        left_out: number of rollouts left out, by reason.
    """

    rollouts: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


type Located = Iterable[tuple[str, Result]]

NO_REWARD, LOW_REWARD = "without a reward", "below --min-reward"
NO_MESSAGES = "without a message of the model"
_JOB_ID = TypeAdapter[str](JobId)


def export(
    results: Located,
    format_: ExportFormat,
    path: Path,
    *,
    min_reward: float | None = None,
    force: bool = False,
    run: RunDescription | None = None,
) -> Written:
    """Write results in a format. The target gets its name only when it is complete.

    Args:
        results: each with its location, for messages.
        format_: of the target.
        path: of the target: a file; for `hf` and `atif` a folder.
        min_reward: leave out results with a lower reward or without one.
        force: replace an existing target.
        run: description of the results' run; None if unknown.

    Raises:
        InputError: a result cannot be read or exported, nothing is left to write, the target exists or
            cannot be written, or pyarrow is missing.
    """
    written = Written()
    wanted = _wanted(results, written, format_ is ExportFormat.SFT, min_reward)
    place = new_folder if format_ in (ExportFormat.HF, ExportFormat.ATIF) else new_file
    with place(path, force=force) as partial:
        match format_:
            case ExportFormat.CSV:
                write_csv(wanted, partial, written)
            case ExportFormat.PARQUET:
                from prorl_envs.exports.parquet import write_table

                write_table(wanted, partial, written)
            case ExportFormat.HF:
                from prorl_envs.exports.parquet import write_dataset

                write_dataset(wanted, partial, written)
            case ExportFormat.SFT:
                write_sft(wanted, partial, written)
            case ExportFormat.ATIF:
                write_atif(wanted, partial, written, run)
        if not written.rollouts:
            reasons = ", ".join(f"{count} {reason}" for reason, count in written.left_out.items())
            raise InputError("there is no rollout to export", hint=f"left out: {reasons}" if reasons else "")
    return written


def _wanted(results: Located, written: Written, graded: bool, min_reward: float | None) -> Located:
    for where, result in results:
        if result.reward is None and (graded or min_reward is not None):
            written.left_out[NO_REWARD] += 1
        elif result.reward is not None and min_reward is not None and result.reward < min_reward:
            written.left_out[LOW_REWARD] += 1
        else:
            yield where, result


def converted[T](results: Located, convert: Callable[[Result], T]) -> Iterator[tuple[str, Result, T]]:
    """Yield each result with its conversion.

    Raises:
        InputError: a result cannot be converted, since its messages are no chat messages; names its line.
    """
    for where, result in results:
        try:
            yield where, result, convert(result)
        except (LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: messages: not in the chat format: {error!r}", hint="correct or remove the line"
            ) from error


def write_csv(results: Located, path: Path, written: Written) -> None:
    """Write a table with a row for each result, and the names of the columns in the first line."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(column.name for column in COLUMNS)
        for _, result in results:
            rows.writerow(map(_cell, row_of(result).values()))
            written.rollouts += 1


def _cell(value: Value) -> Value:
    """Format booleans so that pandas and polars both read them."""
    return str(value).lower() if isinstance(value, bool) else value


def write_sft(results: Located, path: Path, written: Written) -> None:
    """Write a line for each result: `messages`, and `tools` as JSON text.

    Tools have no fields in common, and readers that infer one type for all would add nulls to their schemas.
    """
    with path.open("w", encoding="utf-8") as file:
        for _, result, messages in converted(results, training_messages):
            if not messages:
                written.left_out[NO_MESSAGES] += 1
                continue
            _write_json(file, {"messages": messages, "tools": as_json(result.tools)})
            file.write("\n")
            written.rollouts += 1


def write_atif(results: Located, folder: Path, written: Written, run: RunDescription | None) -> None:
    """Write a folder with a document for each result: `<job id>.json`."""
    for where, result, document in converted(results, lambda one: atif_of(one, run)):
        if document is None:
            written.left_out[NO_MESSAGES] += 1
            continue
        path = folder / f"{_checked(result.job_id, where)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                _write_json(file, document)
        except FileExistsError:
            raise InputError(
                f"{where}: an earlier line has the job id {result.job_id}, too",
                hint="export each run into a folder of its own",
            ) from None
        written.rollouts += 1


def _checked(job_id: str, where: str) -> str:
    """Return the job id if it is safe as a path: no part is `..`."""
    try:
        return _JOB_ID.validate_python(job_id)
    except ValidationError as error:
        raise InputError(f"{where}: job_id: {error.errors()[0]['msg']}", hint="correct the line") from error


def _write_json(file: IO[str], value: Mapping[str, Any]) -> None:
    json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
