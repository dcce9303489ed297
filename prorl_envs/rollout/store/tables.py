"""Tables of a store, and the form of their values.

To add a column: add it to `TABLES`, raise `FORMAT`, and write and read it in `sql.py`.
"""

import contextlib
import json
import sqlite3
import zlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import ARRAYS, body_of
from prorl_envs.rollout.api.types import ALL, Result, Selection

#: Format of the tables. A store of another format is refused.
FORMAT = 9
# - groups.missing: number of jobs without a result.
# - jobs.cursor: cursor of the result, which may have been dropped.
# - results.total: number of tokens of all results ever recorded, up to and including this row. So the number
#   of tokens in a range of rows is a difference of two totals.
# - results.body: the result without its arrays, which are in ids, loss_mask and logprobs.
# - turns: sampled answers of jobs without a result, by what the model had read.
# - kept: state that a restarted service needs.
# - read_results: results that a reader has acknowledged; all others are unread.
# - dropped_results: dropped results, so that readers get an error instead of a gap. A row without a group
#   stands for all results up to its cursor.
TABLES = """
CREATE TABLE groups (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL, environment TEXT NOT NULL,
    request BLOB NOT NULL, missing INTEGER NOT NULL, batch_id TEXT, weight_version INTEGER
);
CREATE INDEX unfinished ON groups (number) WHERE missing > 0;
CREATE INDEX of_a_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;
CREATE TABLE jobs (
    number INTEGER, sample INTEGER, attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0, cursor INTEGER, state TEXT, reward REAL, failure TEXT,
    PRIMARY KEY (number, sample)
) WITHOUT ROWID;
CREATE TABLE turns (
    number INTEGER, sample INTEGER, history BLOB, answer BLOB NOT NULL,
    PRIMARY KEY (number, sample, history)
) WITHOUT ROWID;
CREATE TABLE results (
    cursor INTEGER PRIMARY KEY, number INTEGER NOT NULL, tokens INTEGER NOT NULL,
    total INTEGER NOT NULL, body BLOB NOT NULL, ids BLOB, loss_mask BLOB, logprobs BLOB
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, request BLOB NOT NULL, tenant TEXT NOT NULL,
    carried TEXT NOT NULL, dropped INTEGER NOT NULL, closed INTEGER NOT NULL, cancelled_at INTEGER
);
CREATE TABLE batch_tasks (
    number INTEGER, position INTEGER, body BLOB NOT NULL, PRIMARY KEY (number, position)
) WITHOUT ROWID;
CREATE TABLE kept (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE read_results (cursor INTEGER PRIMARY KEY, tokens INTEGER NOT NULL);
CREATE TABLE dropped_results (
    cursor INTEGER PRIMARY KEY, group_id TEXT, environment TEXT, state TEXT
);
"""
#: Columns that `unpack` reads.
RESULT = "cursor, body, ids, loss_mask, logprobs"
#: SQL condition: no result of the group is stored any more.
WITHOUT_RESULTS = (
    "NOT EXISTS (SELECT 1 FROM jobs JOIN results USING (cursor) WHERE jobs.number = groups.number)"
)
#: Maximum number of rows in memory at once.
_ROWS = 100


def check_format(found: int) -> None:
    """Check the format of a store.

    Raises:
        InputError: this version does not read it.
    """
    if found != FORMAT:
        hint = "open it with the version that wrote it, or use a new store"
        raise InputError(f"the store has format {found}; this version reads {FORMAT}", hint=hint)


def bodies(
    view: sqlite3.Connection, after: int, limit: int, only: Selection = ALL
) -> Iterator[tuple[int, int, bytes]]:
    """Yield cursor, number of tokens and JSON without arrays of at most `limit` results after a cursor."""
    where, values = condition(only)
    while limit > 0:
        rows = view.execute(
            f"SELECT cursor, tokens, body FROM results WHERE cursor > ?{where} ORDER BY cursor LIMIT ?",
            (after, *values, min(limit, _ROWS)),
        ).fetchall()
        yield from ((cursor, tokens, zlib.decompress(body)) for cursor, tokens, body in rows)
        if len(rows) < min(limit, _ROWS):
            return
        after, limit = rows[-1][0], limit - len(rows)


def condition(only: Selection) -> tuple[str, list[str]]:
    """Return a selection as an SQL condition and its values.

    Groups are looked up by their id. The other conditions are checked for each result after the cursor: these
    are few, since most readers have already read most results.
    """
    sql = ""
    values: list[str] = []
    of_group = " AND EXISTS (SELECT 1 FROM groups WHERE groups.number = results.number AND "
    if only.groups:
        ids = one_of("id", only.groups, values)
        sql += f" AND cursor IN (SELECT cursor FROM groups JOIN jobs USING (number) WHERE {ids})"
    if only.environments:
        sql += f"{of_group}{one_of('environment', only.environments, values)})"
    if only.prefix:
        sql += f"{of_group}substr(id, 1, length(?)) = ?)"
        values.extend([only.prefix, only.prefix])
    if only.states:
        states = one_of("state", only.states, values)
        sql += (
            " AND EXISTS (SELECT 1 FROM jobs WHERE jobs.number = results.number"
            f" AND jobs.cursor = results.cursor AND {states})"
        )
    return sql, values


def one_of(column: str, accepted: Collection[str], values: list[Any]) -> str:
    """Return the condition that a column has one of these values, which are appended to `values`."""
    values.extend(sorted(accepted))
    return f"{column} IN ({', '.join('?' * len(accepted))})"


def pack(result: Result) -> tuple[bytes | None, ...]:
    """Return the columns `body`, `ids`, `loss_mask` and `logprobs` of a result."""
    body, trajectory = deflate(body_of(result)), result.trajectory
    if trajectory is None:
        return (body, None, None, None)
    return (
        body,
        _pack_integers(trajectory.ids),
        _pack_integers(trajectory.loss_mask),
        _pack_reals(trajectory.logprobs),
    )


def unpack(row: Sequence[Any]) -> Result:
    """Return the result in a row with the columns `RESULT`."""
    cursor, body, *columns = row
    fields = json.loads(zlib.decompress(body))
    if fields["trajectory"] is not None:
        fields["trajectory"] |= dict(zip(ARRAYS, map(_unpack_numbers, columns), strict=True))
    return Result.model_validate({**fields, "cursor": cursor})


def deflate(data: bytes) -> bytes:
    """Compress data quickly; `zlib.decompress` reads the result."""
    return zlib.compress(data, 1)


def _pack_integers(values: Sequence[int]) -> bytes:
    """Pack integers as the smallest machine type that fits all of them, compressed."""
    for code in "BHIq":
        with contextlib.suppress(OverflowError):  # the next type is wider
            return _deflate_array(array(code, values))
    raise OverflowError("a number of more than 64 bits")


def _pack_reals(values: list[float]) -> bytes:
    """Pack numbers, compressed, in single precision if this is exact for all, otherwise in double."""
    single = array("f", values)
    return _deflate_array(single if single.tolist() == values else array("d", values))


def _deflate_array(numbers: "array[Any]") -> bytes:
    return deflate(numbers.typecode.encode() + numbers.tobytes())


def _unpack_numbers(packed: bytes) -> list[Any]:
    content = zlib.decompress(packed)
    return array(chr(content[0]), content[1:]).tolist()
