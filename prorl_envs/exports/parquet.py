"""Parquet tables of results, and folders that Hugging Face's `datasets` loads. Needs pyarrow."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.exports.chat import message_of
from prorl_envs.exports.columns import COLUMNS, Located, Written, as_json, converted, row_of
from prorl_envs.extras import install_extras
from prorl_envs.rollout.api.types import Result
from prorl_envs.strict_json import json_object

try:
    import pyarrow
    from pyarrow.parquet import ParquetWriter
except ImportError as error:
    raise InputError(
        "Parquet needs pyarrow", hint=f"{install_extras('parquet')}, or export to csv or sft"
    ) from error

#: Maximum number of rows, and of characters in their messages, in a row group. A row group is in memory.
_GROUP_ROWS, _GROUP_CHARACTERS = 1000, 4 << 20

_TYPES: Mapping[type, Any] = {
    str: pyarrow.string(),
    int: pyarrow.int64(),
    float: pyarrow.float64(),
    bool: pyarrow.bool_(),
}
_TABLE = pyarrow.schema([(column.name, _TYPES[column.type]) for column in COLUMNS])
_TEXT = pyarrow.string()


def _dataset_schema(json_type: Any) -> Any:
    """Return the schema of a dataset. `json_type` is the type of the arguments and schemas of tools, which
    have different fields for each tool."""
    function = pyarrow.struct([("name", _TEXT), ("arguments", json_type)])
    call = pyarrow.struct([("id", _TEXT), ("type", _TEXT), ("function", function)])
    texts = [(name, _TEXT) for name in ("role", "content", "reasoning_content", "name", "tool_call_id")]
    message = pyarrow.struct([*texts, ("tool_calls", pyarrow.list_(call))])
    return pyarrow.schema([("messages", pyarrow.list_(message)), ("tools", json_type), *_TABLE])


#: `datasets` 4.7 loads Parquet's JSON type as objects. pyarrow creates such columns only by a cast from text.
_DATASET, _DATASET_TEXT = _dataset_schema(pyarrow.json_()), _dataset_schema(_TEXT)

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {path}
---

{rollouts} rollouts, exported by prorl-envs. `messages` is the conversation and `tools` the schemas of its
tools, both in OpenAI's format; the other columns describe the rollout. Needs version 4.7 of `datasets`.
"""
_DATA = "data/train.parquet"


def write_table(results: Located, path: Path, written: Written) -> None:
    """Write a Parquet file with a row for each result."""
    _write(path, _TABLE, _TABLE, ((row_of(result), 0) for _, result in results), written)


def write_dataset(results: Located, folder: Path, written: Written) -> None:
    """Write a folder for `datasets.load_dataset`, with the columns of a table, `messages` and `tools`."""
    path = folder / _DATA
    path.parent.mkdir()
    _write(path, _DATASET_TEXT, _DATASET, (row for _, _, row in converted(results, _dataset_row)), written)
    card = _CARD.format(path=_DATA, rollouts=written.rollouts)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _dataset_row(result: Result) -> tuple[dict[str, Any], int]:
    messages = [message_of(message) for message in result.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            text = call["function"]["arguments"]
            call["function"]["arguments"] = text if json_object(text) is not None else json.dumps(text)
    size = sum(len(message["content"]) for message in messages)
    return {"messages": messages, "tools": as_json(result.tools), **row_of(result)}, size


def _write(
    path: Path, row_schema: Any, schema: Any, rows: Iterable[tuple[Mapping[str, Any], int]], written: Written
) -> None:
    """Write a Parquet file.

    Args:
        path: path of the file.
        row_schema: schema of the rows; `schema`: schema of the file, to which the rows are cast.
        rows: the rows, each with the number of characters in its messages.
        written: counts the rollouts.
    """
    with ParquetWriter(path, schema, compression="zstd") as file:
        for group in _groups(rows):
            file.write_batch(pyarrow.RecordBatch.from_pylist(group, schema=row_schema).cast(schema))
            written.rollouts += len(group)


def _groups(rows: Iterable[tuple[Mapping[str, Any], int]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in row groups of limited size."""
    group: list[Mapping[str, Any]] = []
    characters = 0
    for row, size in rows:
        group.append(row)
        characters += size
        if len(group) >= _GROUP_ROWS or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
