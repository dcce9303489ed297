"""A service that has finished many jobs holds no more than one that has finished few."""

import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.types import Sampled, Sampling
from prorl_envs.rollout.sqlite_store import SqliteStore
from prorl_envs.rollout.store import Store
from prorl_envs.testing.scripted import as_message

pytestmark = pytest.mark.anyio

JOBS, KEPT = 128, 160


class Finishing:
    """A model that remembers nothing."""

    def __init__(self, renderer: TemplateRenderer) -> None:
        ids = tuple(renderer.assistant(as_message([{"tool": "finish", "arguments": {}}])))
        self._answer = Sampled(ids, (-0.5,) * len(ids), "stop", "1", "in-process")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        return self._answer

    async def aclose(self) -> None:
        """Nothing to end."""


def objects() -> Counter[str]:
    gc.collect()
    found = Counter(type(each).__name__ for each in gc.get_objects())
    del found["ReferenceType"]  # sqlite3 has one of each cursor, and forgets them at every 200th
    return found


@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_objects_do_not_grow_with_the_jobs_done(
    kind: str, make_bench: Any, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    store: Store | None = SqliteStore(tmp_path / "store.db", max_results=KEPT) if kind == "file" else None
    bench = await make_bench(model=Finishing(renderer), kept_in=store, keep_results=KEPT)
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
            after = (await bench.service.results(after, limit=JOBS, wait_s=60)).next
        await bench.gone()
        seen.append(objects())
    # What is made once, or is still on its way out, is in one of these; what is kept of each job, in all.
    grown = min((after - before for before, after in itertools.pairwise(seen[1:])), key=Counter.total)
    assert grown.total() < JOBS // 2, f"in {JOBS} jobs: {grown.most_common(10)}"
    await bench.service.stop()
    if store is not None:
        await store.aclose()
