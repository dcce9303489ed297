"""Test environment of every fault: a real service with real sandboxes, and records of the expected jobs."""

import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import ModelClient
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, JobState, Result, job_id
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.leaks import OpenResources, leaks_since
from tests.support.timed_server import TimedServer
from tests.support.toy import ToyModel, ToyWorld, empty_node

INSTRUCTION = "Write the sum of the numbers in numbers.txt to sum.txt."
TASK = {
    "id": "sum",
    "instruction": INSTRUCTION,
    "files": {"numbers.txt": "1\n2\n39\n"},
    "checks": [{"type": "file_equals", "path": "sum.txt", "text": "42"}],
}
BOOK = ScriptBook.from_tapes(
    {
        INSTRUCTION: [
            [{"tool": "bash", "arguments": {"command": "cat numbers.txt"}}],
            [{"tool": "bash", "arguments": {"command": "paste -sd+ numbers.txt | sed 's/+$//' > sum.expr"}}],
            [{"tool": "bash", "arguments": {"command": "echo $(($(cat sum.expr))) > sum.txt"}}],
        ]
    }
)
#: Size of a page of results that is large enough for all of these.
_ALL = 1_000_000


@dataclass(slots=True)
class World:
    """Environment of one round.

    Args:
        run_dir: an empty directory with a short path, where sandboxes and stores keep their files.
        chance: source of all random choices.
        scale: amount of work in a round; 1 in the tests.
    """

    run_dir: Path
    chance: random.Random
    scale: int = 1
    _names: int = 0
    submitted: list[GroupRequest] = field(default_factory=list)

    def groups(self, count: int, samples: int = 4, **fields: Any) -> list[GroupRequest]:
        """Make new groups, and record them."""
        groups = []
        for _ in range(count):
            self._names += 1
            values = {"environment": "bash", "task": TASK, "limits": AgentLimits(max_turns=8), **fields}
            groups.append(
                GroupRequest.model_validate({"id": f"g{self._names}", "samples": samples, **values})
            )
        self.submitted += groups
        return groups

    @property
    def jobs(self) -> int:
        return sum(group.samples for group in self.submitted)

    def path(self, name: str) -> Path:
        return self.run_dir / name

    @asynccontextmanager
    async def model(self, mix: str = "solve=1", **options: Any) -> AsyncIterator[TimedServer]:
        """Scripted model server."""
        async with TimedServer(BOOK, mix=mix, **options) as server:
            yield server

    @asynccontextmanager
    async def service(self, model_url: str, **settings: Any) -> AsyncIterator[RolloutService]:
        """Started service with real sandboxes and a store in a file."""
        renderer = builtin_renderer()
        quick = ClientLimits(attempts=3, backoff_s=0.02, max_backoff_s=0.1, connect_s=2)
        async with AsyncExitStack() as stack:
            node = await stack.enter_async_context(
                Node(make_driver(choose_driver(), self.run_dir), self.run_dir, warm_pool_size=2)
            )
            pool = ModelPool(
                lambda url: VllmClient(
                    url, stop_ids=renderer.stop_ids, vocab_size=renderer.vocab_size, limits=quick
                )
            )
            stack.push_async_callback(pool.aclose)
            pool.add(model_url)
            store = SqliteStore(self.path("store.db"))
            stack.push_async_callback(store.aclose)
            sizes = {"init": 2, "run": 4, "eval": 2, "attempts": 3, **settings}
            service = RolloutService(
                node, {"bash": BashEnvironment}, renderer, pool, ServiceSettings(**sizes), store
            )
            await service.start()
            stack.push_async_callback(service.stop)
            yield service

    @asynccontextmanager
    async def toys(
        self, store: SqlStore | None = None, clock: Clock | None = None, **settings: Any
    ) -> AsyncIterator[tuple[RolloutService, ToyWorld]]:
        """Started service over environments without sandboxes, for thousands of jobs."""
        service, toys = _toys(store, clock, settings)
        await service.start()
        try:
            yield service, toys
        finally:
            await service.stop()
        assert toys.open == 0, "an environment was not closed"

    @asynccontextmanager
    async def served_toys(self) -> AsyncIterator[str]:
        """Yield the URL of such a service."""
        service, toys = _toys(None, None, {})
        async with serving(service) as url:
            yield url
        assert toys.open == 0, "an environment was not closed"

    async def read(self, source: RolloutService | RolloutClient) -> list[Result]:
        """Return all expected results, in order of arrival."""
        read: list[Result] = []
        while len(read) < self.jobs:
            after = read[-1].cursor if read else 0
            if isinstance(source, RolloutService):
                page = await source.feed.page(after, limit=_ALL, wait_s=60)
            else:
                page = await source.page(after, limit=1000, wait_s=60)
            read += page.results
        return read

    def check(
        self, results: Sequence[Result], *, reward: float | None = 1.0, warned: str | None = None
    ) -> None:
        """Check that no result is lost or duplicated, and that no ungraded job has a reward.

        Args:
            results: all results.
            reward: reward of every graded job; None if they differ.
            warned: text in an observation after which the job's reward may differ; scripts ignore it.
        """
        asked = sorted(job_id(group.id, n) for group in self.submitted for n in range(group.samples))
        assert sorted(result.job_id for result in results) == asked, "a job was lost, or has two results"
        cursors = [result.cursor for result in results]
        assert cursors == sorted(set(cursors)), "cursors do not grow"
        for result in results:
            done = result.state is JobState.DONE
            assert (result.reward is not None) == done == (result.failure is None), result
            assert done or result.mask_sample, "a failure would be trained on"
            told = warned is not None and warned in json.dumps(result.messages)
            assert not done or reward is None or told or result.reward == reward, result
            assert result.trajectory is None or result.trajectory.drift == 0
            assert result.failure is None or result.failure.kind != "internal", result.failure

    async def nothing_new(self, before: OpenResources) -> None:
        """Return once all processes started since `before` have exited."""
        while OpenResources.now(self.run_dir).processes.keys() - before.processes.keys():
            await asyncio.sleep(0.02)


@contextmanager
def new_world(seed: int, scale: int) -> Iterator[World]:
    """Set up the environment of one round; at its end no resource may be leaked.

    Raises:
        AssertionError: a resource was leaked, which is named.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="prf-")).resolve()
    try:
        before = OpenResources.now(run_dir)
        yield World(run_dir, random.Random(seed), scale)
        for kept in run_dir.iterdir():  # stores and logs are ours
            if kept.is_file():
                kept.unlink()
        leaks = leaks_since(before, run_dir)
        assert not leaks, "left behind:\n" + "\n".join(leaks)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _toys(
    store: SqlStore | None, clock: Clock | None, settings: dict[str, Any]
) -> tuple[RolloutService, ToyWorld]:
    toys, renderer = ToyWorld(), builtin_renderer()
    families: dict[str, Family] = {"toy": toys.family()}
    model: ModelClient = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}])
    return (
        RolloutService(empty_node(), families, renderer, model, ServiceSettings(**settings), store, clock),
        toys,
    )
