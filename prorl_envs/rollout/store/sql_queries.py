"""Read-only queries of a results database: pages by cursor, summaries and text search."""

import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.summary import Summary, holds, needles, summary_of_body
from prorl_envs.rollout.api.types import ALL, Selection

#: Maximum number of rows in memory at once.
_ROWS = 100
#: Approximate maximum of bytes that one step of a search reads.
STEP = 16 << 20
#: SQL condition: no result of the group is stored any more.
WITHOUT_RESULTS = (
    "NOT EXISTS (SELECT 1 FROM jobs JOIN results USING (cursor) WHERE jobs.number = groups.number)"
)


class _JobId(msgspec.Struct):
    job_id: str


_JOB_ID = msgspec.json.Decoder(_JobId)


class Rows(Protocol):
    """Result set of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class DbConnection(Protocol):
    """Subset of `sqlite3.Connection` that the store uses. A `with` block commits, or rolls back on errors."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...
    def __enter__(self) -> object: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> object: ...


def summaries(view: DbConnection, after: int, limit: int, only: Selection = ALL) -> list[Summary]:
    """Return summaries of results, see `SqlStore.summaries`."""
    return [
        summary_of_body(zlib.decompress(body), cursor, tokens)
        for cursor, tokens, body in bodies(view, after, limit, only)
    ]


def search(view: DbConnection, text: str, after: int, limit: int, only: Selection = ALL) -> SearchPage:
    """Run one search step, see `SqlStore.search`."""
    patterns, jobs, searched_bytes = needles(text), [], 0
    for cursor, _, packed in bodies(view, after, limit, only):
        body = zlib.decompress(packed)
        after, searched_bytes = cursor, searched_bytes + len(body)
        if holds(body, patterns):
            jobs.append(_JOB_ID.decode(body).job_id)
        if searched_bytes >= STEP:
            break
    return SearchPage(jobs=jobs, next=after)


def bodies(
    view: DbConnection, after: int, limit: int, only: Selection = ALL
) -> Iterator[tuple[int, int, bytes]]:
    """Yield cursor, number of tokens and compressed JSON of at most `limit` results after a cursor."""
    where, values = condition(only)
    while limit > 0:
        rows = view.execute(
            f"SELECT cursor, tokens, body FROM results WHERE cursor > ?{where} ORDER BY cursor LIMIT ?",
            (after, *values, min(limit, _ROWS)),
        ).fetchall()
        yield from rows
        if len(rows) < min(limit, _ROWS):
            return
        after, limit = rows[-1][0], limit - len(rows)


def cursors(
    view: DbConnection, after: int, up_to: int, only: Selection = ALL, *, unread: bool = False
) -> list[int]:
    """Return the cursors of results, see `SqlStore.cursors`."""
    where, values = condition(only)
    if unread:
        where += " AND cursor NOT IN (SELECT cursor FROM read_results)"
    rows = view.execute(
        f"SELECT cursor FROM results WHERE cursor > ? AND cursor <= ?{where} ORDER BY cursor",
        (after, up_to, *values),
    )
    return [cursor for [cursor] in rows.fetchall()]


def newest_dropped(view: DbConnection, after: int, only: Selection) -> int:
    """Return the greatest cursor after `after` of a dropped result that the selection may accept, or 0."""
    conditions = ["TRUE"]
    values: list[Any] = [after]
    columns = {"group_id": only.groups, "environment": only.environments, "state": only.states}
    for column, accepted in columns.items():
        if accepted:
            conditions.append(f"{column} IN ({', '.join('?' * len(accepted))})")
            values.extend(sorted(accepted))
    if only.prefix:
        conditions.append("substr(group_id, 1, length(?)) = ?")
        values.extend([only.prefix, only.prefix])
    newest: int | None = view.execute(
        "SELECT max(cursor) FROM dropped_results"
        f" WHERE cursor > ? AND (group_id IS NULL OR {' AND '.join(conditions)})",
        values,
    ).fetchone()[0]
    return newest or 0


def condition(only: Selection) -> tuple[str, list[str]]:
    """Return a selection as an SQL condition and its values.

    Groups are looked up by their id. The other conditions are checked for each result after the cursor: these
    are few, since most readers have already read most results.
    """
    sql = ""
    values: list[str] = []

    def one_of(column: str, accepted: Collection[str]) -> str:
        values.extend(sorted(accepted))
        return f"{column} IN ({', '.join('?' * len(accepted))})"

    if only.groups:
        ids = one_of("id", only.groups)
        sql += f" AND cursor IN (SELECT cursor FROM groups JOIN jobs USING (number) WHERE {ids})"
    if only.environments:
        names = one_of("environment", only.environments)
        sql += f" AND EXISTS (SELECT 1 FROM groups WHERE groups.number = results.number AND {names})"
    if only.prefix:
        sql += (
            " AND EXISTS (SELECT 1 FROM groups WHERE groups.number = results.number"
            " AND substr(id, 1, length(?)) = ?)"
        )
        values.extend([only.prefix, only.prefix])
    if only.states:
        states = one_of("state", only.states)
        sql += (
            " AND EXISTS (SELECT 1 FROM jobs WHERE jobs.number = results.number"
            f" AND jobs.cursor = results.cursor AND {states})"
        )
    return sql, values
