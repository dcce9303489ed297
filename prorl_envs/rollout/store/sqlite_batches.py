"""Batches in the database of a store. These functions run in the store's threads, within a transaction. An
error that refuses a request is raised before anything is written."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.errors import Conflict
from prorl_envs.rollout.api.types import split_job_id
from prorl_envs.rollout.store.base import StoredBatch
from prorl_envs.rollout.store.sql_queries import WITHOUT_RESULTS, DbConnection
from prorl_envs.rollout.store.sqlite_schema import deflate


def insert(db: DbConnection, batch: StoredBatch) -> None:
    """Insert a new batch."""
    request = batch.request
    # ":" follows "9" in ASCII, so this range of the index has all ids of the form `<id>/<index>`.
    candidates = db.execute(
        "SELECT id FROM groups WHERE id >= ? AND id < ?", (f"{request.id}/0", f"{request.id}/:")
    )
    if any(split_job_id(row[0])[0] == request.id for row in candidates.fetchall()):
        raise Conflict(f"there is a group {request.id}/<index> already", hint="use a new id for the batch")
    unset = _unset_fields(request) | {
        "tasks": {i: _unset_fields(task) for i, task in enumerate(request.tasks)}
    }
    body = deflate(request.model_dump_json(exclude=unset).encode())
    db.execute(
        "INSERT INTO batches (id, request, tenant, carried, dropped, closed) VALUES (?, ?, ?, ?, ?, ?)",
        (request.id, body, batch.tenant, json.dumps(batch.carried), batch.dropped, batch.closed),
    )
    db.executemany(
        "UPDATE groups SET batch_id = ? WHERE id = ?", ((request.id, group) for group in batch.carried)
    )


def extend(db: DbConnection, batch_id: str, first: int, tasks: Sequence[BatchTask], *, closed: bool) -> None:
    """Append tasks to a batch, the first of them at the index `first`."""
    [number] = db.execute("SELECT number FROM batches WHERE id = ?", (batch_id,)).fetchone()
    rows = [
        (number, position, deflate(task.model_dump_json(exclude=_unset_fields(task)).encode()))
        for position, task in enumerate(tasks, first)
    ]
    db.executemany("INSERT INTO batch_tasks (number, position, body) VALUES (?, ?, ?)", rows)
    db.execute("UPDATE batches SET closed = ? WHERE number = ?", (closed, number))


def cancel(db: DbConnection, batch_id: str) -> int:
    """Store the cancellation of a batch. Return the cursor of the newest result."""
    newest: int = db.execute("SELECT coalesce(max(cursor), 0) FROM results").fetchone()[0]
    db.execute("UPDATE batches SET cancelled_at = ? WHERE id = ?", (newest, batch_id))
    return newest


def drop(db: DbConnection, batch_id: str) -> None:
    """Delete a batch, and those of its groups that have no stored results any more."""
    [number] = db.execute("SELECT number FROM batches WHERE id = ?", (batch_id,)).fetchone()
    db.execute("DELETE FROM batch_tasks WHERE number = ?", (number,))
    db.execute("DELETE FROM batches WHERE number = ?", (number,))
    dropped_groups = db.execute(
        f"SELECT number FROM groups WHERE batch_id = ? AND missing = 0 AND {WITHOUT_RESULTS}", (batch_id,)
    ).fetchall()
    db.executemany("DELETE FROM jobs WHERE number = ?", dropped_groups)
    db.executemany("DELETE FROM groups WHERE number = ?", dropped_groups)
    db.execute("UPDATE groups SET batch_id = NULL WHERE batch_id = ?", (batch_id,))


def read(db: DbConnection) -> list[StoredBatch]:
    """Return every batch, oldest first."""
    batches = []
    rows = db.execute(
        "SELECT number, request, tenant, carried, dropped, closed, cancelled_at FROM batches ORDER BY number"
    )
    for number, request, tenant, carried, dropped, closed, cancelled_at in rows.fetchall():
        tasks = db.execute("SELECT body FROM batch_tasks WHERE number = ? ORDER BY position", (number,))
        batches.append(
            StoredBatch(
                BatchRequest.model_validate_json(zlib.decompress(request)),
                tenant,
                tuple(json.loads(carried)),
                dropped,
                tuple(BatchTask.model_validate_json(zlib.decompress(body)) for (body,) in tasks),
                bool(closed),
                cancelled_at,
            )
        )
    return batches


def _unset_fields(row: BatchRequest | BatchTask) -> dict[str, Any]:
    """Return the fields of `sampling` and `limits` that the request did not set. They are not stored, so that
    the environment's defaults still apply to them."""
    parts = {"sampling": row.sampling, "limits": row.limits}
    return {
        name: set(type(part).model_fields) - part.model_fields_set
        for name, part in parts.items()
        if part is not None
    }
