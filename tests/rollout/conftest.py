"""Service with toy environments that a test can stop at any step."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import ModelClient
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import ToyModel, ToyWorld, empty_node


@pytest.fixture(scope="session")
def renderer() -> TemplateRenderer:
    return builtin_renderer()


type OpenStore = Callable[..., AbstractAsyncContextManager[SqlStore]]


@pytest.fixture(params=["local", "shared"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
    """Function that opens the same durable store again, with the given bounds, on a file system of one or of
    several machines."""
    monkeypatch.setattr("prorl_envs.rollout.store.sqlite._shared", lambda folder: request.param == "shared")

    @asynccontextmanager
    async def opening(**bounds: Any) -> AsyncIterator[SqlStore]:
        store = SqliteStore(tmp_path / "store.db", **bounds)
        try:
            yield store
        finally:
            await store.aclose()

    return opening


@dataclass
class Bench:
    """A started service with its model and results."""

    service: RolloutService
    world: ToyWorld
    results: list[Result] = field(default_factory=list)

    def group(self, name: str = "g", samples: int = 1, **fields: Any) -> GroupRequest:
        """Return a group whose task may carry `faults` and a `reward`."""
        task = {"id": name, "instruction": f"Do {name}."}
        task |= {key: fields.pop(key) for key in ("faults", "reward") if key in fields}
        return GroupRequest.model_validate(
            {"id": name, "environment": "toy", "task": task, "samples": samples, **fields}
        )

    async def submit(self, *groups: GroupRequest) -> None:
        await self.service.groups.submit(list(groups))

    async def finished(self, count: int) -> list[Result]:
        """Return the first `count` results, in order."""
        while len(self.results) < count:
            after = self.results[-1].cursor if self.results else 0
            page = await self.service.feed.page(after, limit=count - len(self.results), wait_s=60)
            self.results += page.results
        return self.results

    async def result(self, group: GroupRequest) -> Result:
        """Submit a group of one and wait for its result."""
        await self.submit(group)
        while True:
            for result in await self.finished(len(self.results) + 1):
                if result.group_id == group.id:
                    return result

    async def idle(self) -> None:
        """Wait until every environment is closed."""
        await self.world.until(lambda: self.world.open == 0)

    async def gone(self) -> None:
        """Wait until the service has no jobs, not even finished or closed ones."""
        while self.service.status().unfinished:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0)


@pytest.fixture
async def make_bench(renderer: TemplateRenderer) -> AsyncIterator[Callable[..., Any]]:
    """Make and start services; stop each at the end and check that it has closed everything."""
    benches: list[Bench] = []

    async def make(
        *,
        model: ModelClient | None = None,
        clock: Clock | None = None,
        kept_in: SqlStore | None = None,
        **settings: Any,
    ) -> Bench:
        world = ToyWorld()
        done: ModelClient = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}])
        service = RolloutService(
            empty_node(),
            {"toy": world.family()},
            renderer,
            model or done,
            ServiceSettings(**settings),
            kept_in,
            clock,
        )
        await service.start()
        benches.append(Bench(service, world))
        return benches[-1]

    yield make
    for bench in benches:
        await bench.service.stop()
        if bench.service.status().close_failures == 0:
            assert bench.world.open == 0, "an environment was not closed"


@pytest.fixture
async def bench(make_bench: Callable[..., Any]) -> Any:
    """A service with the default settings."""
    return await make_bench()
