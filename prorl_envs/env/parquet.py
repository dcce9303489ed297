"""Rows of a Parquet file, in which data sets are often published. Needs pyarrow: the extra `parquet`."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError

MAGIC = b"PAR1"
#: Rows decoded at a time: a row of a code data set may have megabytes.
_BATCH = 32


def is_parquet(path: Path) -> bool:
    """Whether the file says that it is one. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their numbers, from 1.

    Raises:
        InputError: pyarrow is not installed, or the file is damaged.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            f"{path}: a Parquet file, and pyarrow is not installed", hint="pip install 'prorl-envs[parquet]'"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, arrow.ArrowException) as error:
        raise InputError(
            f"{path}:{number + 1}: row: the Parquet file is damaged: {str(error)[:300]}"
        ) from error
