"""Export formats and their writers. Results are read and written one at a time."""

import csv
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.exports.atif import atif_of
from prorl_envs.exports.chat import training_messages
from prorl_envs.exports.columns import COLUMNS, Located, Value, Written, as_json, converted, row_of
from prorl_envs.exports.target import new_file, new_folder
from prorl_envs.rollout.api.types import JobId
from prorl_envs.runs.folder import RunDescription


class ExportFormat(StrEnum):
    """Format of an export."""

    CSV = "csv"
    PARQUET = "parquet"
    HF = "hf"
    SFT = "sft"
    ATIF = "atif"


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
    """Write results in a format. The target appears under its name only when it is complete.

    Args:
        results: results with their locations, for messages.
        format_: format of the target.
        path: path of the target: a folder for `hf` and `atif`, otherwise a file.
        min_reward: omit results without a reward or with a lower reward.
        force: replace an existing target.
        run: description of the results' run; None if unknown.

    Raises:
        InputError: a result cannot be read or exported, all results are omitted, the target exists or cannot
            be written, or pyarrow is missing.
    """
    written = Written()
    selected = _select(results, written, format_ is ExportFormat.SFT, min_reward)
    new_target = new_folder if format_ in (ExportFormat.HF, ExportFormat.ATIF) else new_file
    with new_target(path, force=force) as partial:
        match format_:
            case ExportFormat.CSV:
                write_csv(selected, partial, written)
            case ExportFormat.PARQUET:
                from prorl_envs.exports.parquet import write_table

                write_table(selected, partial, written)
            case ExportFormat.HF:
                from prorl_envs.exports.parquet import write_dataset

                write_dataset(selected, partial, written)
            case ExportFormat.SFT:
                write_sft(selected, partial, written)
            case ExportFormat.ATIF:
                write_atif(selected, partial, written, run)
        if not written.rollouts:
            reasons = ", ".join(f"{count} {reason}" for reason, count in written.left_out.items())
            raise InputError("there is no rollout to export", hint=f"left out: {reasons}" if reasons else "")
    return written


def _select(results: Located, written: Written, graded: bool, min_reward: float | None) -> Located:
    for where, result in results:
        if result.reward is None and (graded or min_reward is not None):
            written.left_out[NO_REWARD] += 1
        elif result.reward is not None and min_reward is not None and result.reward < min_reward:
            written.left_out[LOW_REWARD] += 1
        else:
            yield where, result


def write_csv(results: Located, path: Path, written: Written) -> None:
    """Write a CSV table with a row for each result, after a line with the names of the columns."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(column.name for column in COLUMNS)
        for _, result in results:
            rows.writerow(map(_cell, row_of(result).values()))
            written.rollouts += 1


def _cell(value: Value) -> Value:
    """Return a value in the form of CSV: booleans are in lower case, which pandas and polars both read."""
    return str(value).lower() if isinstance(value, bool) else value


def write_sft(results: Located, path: Path, written: Written) -> None:
    """Write a line of JSON for each result: `messages`, and `tools` as JSON text.

    Schemas of tools differ in their fields, and readers that infer one type for all would add nulls to them.
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
    for where, result, document in converted(results, lambda result: atif_of(result, run)):
        if document is None:
            written.left_out[NO_MESSAGES] += 1
            continue
        path = folder / f"{_safe_path(result.job_id, where)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("x", encoding="utf-8") as file:
                _write_json(file, document)
        except FileExistsError:
            raise InputError(
                f"{where}: an earlier line has the job id {result.job_id}, too",
                hint="export each run to a separate folder",
            ) from None
        written.rollouts += 1


def _safe_path(job_id: str, where: str) -> str:
    """Return the job id if it is safe as a path, without parts such as `..`."""
    try:
        return _JOB_ID.validate_python(job_id)
    except ValidationError as error:
        raise InputError(f"{where}: job_id: {error.errors()[0]['msg']}", hint="correct the line") from error


def _write_json(file: IO[str], value: Mapping[str, Any]) -> None:
    json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
