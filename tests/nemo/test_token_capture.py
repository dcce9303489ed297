"""NeMo Gym's checks of a token source (0.7), with our ledger and our store behind its interface.

NeMo Gym writes the tokens of each model call as they are served. Our service records a whole episode once, as
the ledger of its result, which never changes. So only this test has an adapter: users get the tokens with
the response of `/run`.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture.conformance", reason="NeMo Gym 0.7 and later")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.token_id_capture.conformance import run_conformance
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import TokenEntry

from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result, job_id
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sqlite import SqliteStore

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]

#: Fields of a record that are the tokens of our ledger.
TOKENS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}


def result_of(entry: TokenEntry) -> Result:
    """Return a result with the ledger of one model call."""
    ledger = Ledger(entry.prompt_token_ids)
    sampled = Sampled(
        ids=tuple(entry.generation_token_ids),
        logprobs=tuple(entry.generation_log_probs),
        finish_reason="stop",
        weight_version="",
        server="",
    )
    ledger.sampled(sampled, 0.0)
    return Result(
        job_id=job_id(entry.rollout_id, 0),
        group_id=entry.rollout_id,
        sample=0,
        environment="bash",
        task_id="t",
        state=JobState.DONE,
        reward=1.0,
        mask_sample=False,
        stop_reason=None,
        failure=None,
        trajectory=ledger.trajectory(),
        metadata=entry.model_dump(mode="json", exclude=TOKENS),
    )


def entry_of(result: Result) -> TokenEntry:
    """Return the record of the model call in a result, with the tokens of the ledger."""
    assert result.trajectory is not None
    (turn,) = result.trajectory.turns
    tokens = {
        "prompt_token_ids": result.trajectory.ids[: turn.start],
        "generation_token_ids": result.trajectory.ids[turn.start : turn.end],
        "generation_log_probs": result.trajectory.logprobs[turn.start : turn.end],
    }
    return TokenEntry.model_validate(result.metadata | tokens)


class LedgerCapture:
    """Sink and source of NeMo Gym over a store of results."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def put(self, entry: TokenEntry) -> None:
        result = result_of(entry)
        request = GroupRequest(id=entry.rollout_id, environment="bash", task={})
        await self._store.submit([NewGroup(request, "t")])
        recorded = await self._store.record(result)
        if recorded.model_copy(update={"cursor": 0}) != result:
            raise ValueError("the rollout has another result, and results do not change")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._store.put_value(f"incomplete {rollout_id}", model_call_id or "?")

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        result = await self._store.result(job_id(rollout_id, 0))
        incomplete = await self._store.get_value(f"incomplete {rollout_id}") is not None
        entries = (entry_of(result),)
        return TokenCaptureSnapshot(rollout_id, entries, incomplete, result.job_id, int(incomplete))

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        now = await self.freeze(rollout_id)
        return bool((now.snapshot_id, now.version) == (snapshot_id, version))  # the store has its retention

    async def close(self) -> None:
        """The store is shared."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path / "results.db")
    yield store
    await store.aclose()


async def test_the_ledger_is_a_token_source(store: SqliteStore) -> None:
    def client() -> Any:
        return LedgerCapture(store)

    assert await run_conformance(client, client) == [
        "put_then_freeze_visibility",
        "idempotent_reput",
        "conflicting_reput",
        "mark_incomplete_durability",
        "freeze_idempotency",
        "post_freeze_write_safety",
        "conditional_retirement",
    ]
