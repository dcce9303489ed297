"""Reader for rows of Parquet files, a common format of published data sets. Needs pyarrow: the extra
`parquet`.

A Parquet file has one column per field, so a field that is missing in a row is null there. Null fields of
objects are dropped at every depth, except nested ones that may be values; nulls in lists are kept. A value of
a type that JSON lacks, such as the bytes of an image, is an `Unreadable`, which no task model accepts. So
columns that a family does not use may have any type.
"""

import contextlib
import datetime
import decimal
import json
import logging
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras

logger = logging.getLogger(__name__)

#: Rows decoded at a time. It is small because a row of a code data set can have megabytes.
_BATCH_ROWS = 32
#: Nested fields whose null is a value: the expected result of a call, the expected value of a JSON file.
_NULLABLE = frozenset({"expected", "value"})
#: Formats of `struct` for the narrow types of decimals.
_NARROW = {"halffloat": "e", "float": "f"}


class Unreadable:
    """Value of a type that JSON lacks. It has no text, so it cannot be used by mistake."""

    hint = "JSON has no such type: convert the column"

    def __init__(self, kind: object) -> None:
        self.problem = f"a value of type {str(kind)[:80]}"

    def __str__(self) -> str:
        raise InputError(self.problem, hint=self.hint)


def parquet_rows(path: Path, longest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows with their numbers, from 1. A column with values that JSON lacks is logged once.

    Args:
        longest: maximum characters of a row as JSON.

    Raises:
        InputError: pyarrow is not installed; the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path}: parquet needs pyarrow", hint=f"{install_extras('parquet')}; or give JSONL"
        ) from error
    number = 0
    unreadable: set[str] = set()
    try:
        with path.open("rb") as opened, ParquetFile(opened) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                columns = [[_value(scalar) for scalar in column] for column in batch.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    named = zip(batch.schema.names, values, strict=True)
                    row = {name: value for name, value in named if value is not None}
                    if _size(path, row, unreadable) > longest:
                        raise InputError(f"{path}:{number}: row: longer than {longest} characters as JSON")
                    yield number, row
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        where = f"after row {number}: " if number else ""
        raise InputError(f"{path}: {where}not parquet: {str(error)[:300]}") from error


def readable(value: Any) -> Any:
    """Return a value of `parquet_rows` without its unreadable parts."""
    match value:
        case Unreadable():
            return None
        case dict():
            return {key: readable(item) for key, item in value.items() if not isinstance(item, Unreadable)}
        case list():
            return [readable(item) for item in value]
    return value


def _size(path: Path, row: Mapping[str, Any], unreadable: set[str]) -> int:
    """Return the characters of a row as JSON. Log its unreadable columns, and add them to `unreadable`."""
    size = 0
    for name, value in row.items():
        lost: list[Unreadable] = []
        size += len(name) + len(json.dumps(value, ensure_ascii=False, default=lost.append))
        if lost and name not in unreadable:
            unreadable.add(name)
            logger.warning("%s: column %s: left out: %s, which JSON lacks", path, name, lost[0].problem)
    return size


def _value(scalar: Any) -> Any:
    """Convert a scalar of pyarrow to JSON types."""
    try:
        return _plain(scalar.as_py(maps_as_pydicts="strict"), scalar.type)
    except UnicodeDecodeError:
        raise
    except (KeyError, ValueError, OverflowError):  # equal keys; a time that Python cannot represent
        return Unreadable(scalar.type)


def _plain(value: Any, kind: Any) -> Any:
    """Convert a value of the type `kind` to JSON types, without the nulls of objects."""
    match value:
        case dict():
            items = {str(key): _plain(item, _item_type(kind, key)) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not None or key in _NULLABLE}
        case list():
            return [_plain(item, _item_type(kind, 0)) for item in value]
        case float():
            return _shortest(value, _NARROW.get(str(kind)))
        case None | bool() | int() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return _exact(value)
    return Unreadable(type(value).__name__)


def _item_type(kind: Any, key: Any) -> Any:
    """Return the type of an item of a list, a map or a struct; None if it is not known."""
    for name in ("value_type", "item_type"):
        if hasattr(kind, name):
            return getattr(kind, name)
    return kind.field(key).type if hasattr(kind, "field") else None


def _exact(value: decimal.Decimal) -> int | float | str:
    """Return a decimal as a number that is written with the same digits, or else as its text."""
    if value == value.to_integral_value():
        return int(value)
    number = float(value)
    return number if decimal.Decimal(repr(number)) == value else str(value)


def _shortest(value: float, narrow: str | None) -> float:
    """Return the shortest decimal that has the same value in its narrow type: 0.1 for 0.10000000149011612."""
    if narrow is None or not math.isfinite(value) or (value.is_integer() and abs(value) < 2**24):
        return value
    stored = struct.pack(narrow, value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        with contextlib.suppress(OverflowError):  # rounded up beyond the largest value
            if struct.pack(narrow, short) == stored:
                return short
    return value
