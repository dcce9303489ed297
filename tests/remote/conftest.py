"""A counting resources server over HTTP, and a service that uses it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.remote.environment import NemoEnvironment, nemo_family
from prorl_envs.remote.servers import ResourcesServer
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.resources import ResourcesDesk, count_to_three
from tests.support.toy import Play, ToyModel, empty_node

type Family = type[NemoEnvironment]


@pytest.fixture
def desk() -> ResourcesDesk:
    return ResourcesDesk()


@pytest.fixture
async def url(desk: ResourcesDesk) -> AsyncIterator[str]:
    async with desk.serving() as url:
        yield url


@pytest.fixture
def family(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Family]:
    """Make an environment of the resources server; seeds are retried without delay."""
    monkeypatch.setattr("prorl_envs.remote.environment.SEED_PAUSES_S", (0.0, 0.0))

    def make(**bounds: Any) -> Family:
        return nemo_family("desk", ResourcesServer(**{"url": url, **bounds}))

    return make


@pytest.fixture(scope="session")
def renderer() -> TemplateRenderer:
    return builtin_renderer()


@pytest.fixture
async def roll(
    renderer: TemplateRenderer, family: Callable[..., Family]
) -> AsyncIterator[Callable[..., Any]]:
    """Run one task through the rollout service."""

    async def run(
        row: dict[str, Any], play: Play = count_to_three, samples: int = 1, limits: Any = None, **bounds: Any
    ) -> list[Result]:
        settings = ServiceSettings(attempts=2)
        model = ToyModel(renderer, play)
        service = RolloutService(empty_node(), {"desk": family(**bounds)}, renderer, model, settings)
        await service.start()
        try:
            request = {
                "id": "g",
                "environment": "desk",
                "task": row,
                "samples": samples,
                "limits": limits or {},
            }
            await service.groups.submit([GroupRequest.model_validate(request)])
            results: list[Result] = []
            while len(results) < samples:
                page = await service.feed.page(results[-1].cursor if results else 0, limit=samples, wait_s=60)
                results += page.results
            return results
        finally:
            await service.stop()

    yield run
