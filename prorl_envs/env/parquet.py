"""Reader for rows of Parquet files, a common format of published data sets. Needs pyarrow: the extra
`parquet`.

A Parquet file has one column per field, so a field that is missing in a row is null there. Null fields of
objects are dropped at every depth; nulls in lists are kept.
"""

import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras

#: Rows decoded at a time. It is small because a row of a code data set can have megabytes.
_BATCH_ROWS = 32


def parquet_rows(path: Path, longest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows with their numbers, from 1.

    Args:
        longest: maximum characters of a row as JSON.

    Raises:
        InputError: pyarrow is not installed; the file is damaged; a value has no JSON equivalent.
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
    try:
        with path.open("rb") as opened, ParquetFile(opened) as file:
            for batch in file.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield number, _plain_row(path, number, row, longest)
    except (pyarrow.ArrowException, UnicodeDecodeError, KeyError) as error:
        where = f"after row {number}: " if number else ""
        raise InputError(f"{path}: {where}not parquet: {str(error)[:300]}") from error


def _plain_row(path: Path, number: int, row: Mapping[str, Any], longest: int) -> dict[str, Any]:
    plain = {}
    for name, value in row.items():
        try:
            if value is not None:
                plain[name] = _plain(value)
        except TypeError as error:
            raise InputError(f"{path}:{number}: {name}: {error}", hint="JSON has no such type") from None
    if len(json.dumps(plain, ensure_ascii=False)) > longest:
        raise InputError(f"{path}:{number}: row: longer than {longest} characters as JSON")
    return plain


def _plain(value: Any) -> Any:
    """Convert a value to JSON types, without the nulls of objects."""
    match value:
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [_plain(inner) for inner in value]
        case None | bool() | int() | float() | str():
            return value
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
    raise TypeError(f"a value of type {type(value).__name__}")
