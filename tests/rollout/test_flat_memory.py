"""A service that has finished many jobs uses no more memory than one that has finished few."""

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.config import RetentionSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.testing.scripted import as_message

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]

JOBS, KEPT = 128, 160


class Finishing:
    """Stateless model."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        ids = tuple(renderer.assistant(as_message([{"tool": "finish", "arguments": {}}])))
        self._answer = Sampled(ids, (-0.5,) * len(ids), "stop", "1", "in-process")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        return self._answer

    async def aclose(self) -> None:
        """Do nothing: the model has no sessions."""


def objects() -> Counter[str]:
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects())
    del found["ReferenceType"]  # sqlite3 tracks every cursor, and forgets the dead ones at every 200th
    return found


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_objects_do_not_grow_with_the_jobs_done(
    kind: str, make_bench: Any, renderer: TemplateRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All are full after the first jobs.
    monkeypatch.setattr("prorl_envs.rollout.monitoring.dashboard_state.LAST_RESULTS", JOBS // 4)
    monkeypatch.setattr("prorl_envs.rollout.store.base.KNOWN_DROPPED", KEPT)
    monkeypatch.setattr("prorl_envs.rollout.store.base.RECENT_RESULTS", JOBS // 4)
    store: SqlStore | None = SqliteStore(tmp_path / "store.db", max_results=KEPT) if kind == "file" else None
    bench = await make_bench(
        model=Finishing(renderer), kept_in=store, retention=RetentionSettings(max_results=KEPT)
    )
    bench.world.logging = False
    task = {"id": "t", "instruction": "Do it."}
    seen, after = [], 0
    for number in range(5):
        groups = [
            bench.group(f"{number}-{i}", samples=8).model_copy(update={"task": task})
            for i in range(JOBS // 8)
        ]
        await bench.submit(*groups)
        del groups
        while after < (number + 1) * JOBS:
            after = (await bench.service.feed.page(after, limit=JOBS, wait_s=60)).next
        await bench.gone()
        await asyncio.sleep(0)  # the callbacks of the last tasks run, which releases the tasks
        seen.append(objects())
    # One-time objects and those being released are in one of these; objects kept per job are in all.
    grown = min((after - before for before, after in itertools.pairwise(seen[1:])), key=Counter.total)
    assert grown.total() < JOBS // 2, f"in {JOBS} jobs: {grown.most_common(10)}"
    await bench.service.stop()
    if store is not None:
        await store.aclose()
