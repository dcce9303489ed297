"""Service with nodes, all in the test's event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from prorl_envs.clock import Clock
from prorl_envs.config import ServiceSettings
from prorl_envs.model.answer_checks import ServerUnavailable
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import ModelClient, Sampled
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.messages import Terms
from prorl_envs.rollout.nodes.worker import NodeResources, fingerprint
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.nodes import LocalNode
from tests.support.toy import ToyModel, ToyWorld, empty_node

DONE = [{"tool": "finish", "arguments": {}}]


@pytest.fixture(scope="session")
def renderer() -> TemplateRenderer:
    return builtin_renderer()


class DownModel:
    """Model server that cannot be reached from the nodes."""

    async def generate(self, *args: object, **kwargs: object) -> Sampled:
        raise ServerUnavailable("it is down")

    async def aclose(self) -> None:
        """Do nothing, because there is no connection."""


@dataclass
class Site:
    """Service and its nodes. Each node has its own world."""

    renderer: TemplateRenderer
    model: ModelClient
    service: RolloutService
    fleet: Fleet
    pool: ModelPool
    here: ToyWorld
    clock: Clock | None
    nodes: dict[str, LocalNode] = field(default_factory=dict)
    worlds: dict[str, ToyWorld] = field(default_factory=dict)

    async def join(self, name: str, *, ready: bool = True, **limits: int) -> LocalNode:
        """Start a node, and wait until it has joined."""
        world = self.worlds[name] = ToyWorld()
        families = {"toy": world.family()}
        prepared = NodeResources(empty_node(), families, self.renderer, self._connect)
        given = {"init": 4, "run": 4, "eval": 4, "max_jobs_with_sandbox": 8} | limits
        node = self.nodes[name] = LocalNode(self.fleet, prepared, name, StageLimits(**given), self.clock)
        while ready and name not in {node.name for node in self.fleet.nodes}:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return node

    def _connect(self, url: str) -> ModelClient:
        return DownModel() if "down" in url else self.model

    async def submit(self, name: str = "g", samples: int = 1, **fields: Any) -> GroupRequest:
        """Return a group whose task may carry `faults` and a `reward`."""
        task = {"id": name, "instruction": f"Do {name}."}
        task |= {key: fields.pop(key) for key in ("faults", "reward") if key in fields}
        group = GroupRequest.model_validate(
            {"id": name, "environment": "toy", "task": task, "samples": samples, **fields}
        )
        await self.service.groups.submit([group])
        return group

    async def results(self, count: int) -> list[Result]:
        """Return the first `count` results."""
        found: list[Result] = []
        while len(found) < count:
            after = found[-1].cursor if found else 0
            found += (await self.service.feed.page(after, limit=count, wait_s=30)).results
        return found

    async def settled(self) -> None:
        """Wait until no job has resources."""
        while self.service.status().unfinished:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0)


@pytest.fixture
async def make_site(renderer: TemplateRenderer) -> AsyncIterator[Callable[..., Any]]:
    """Make services without nodes; check at the end that each has closed everything."""
    sites: list[Site] = []

    async def make(
        *,
        model: ModelClient | None = None,
        clock: Clock | None = None,
        head: bool = False,
        terms: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Site:
        given = model or ToyModel(renderer, lambda *_: DONE)
        pool = ModelPool(lambda url: given, clock=clock)
        pool.add("http://model")
        fleet = Fleet(
            pool,
            Terms(**{"environments": ["toy"], "fingerprint": fingerprint(renderer), **(terms or {})}),
            clock,
            head_takes_jobs=head,
        )
        here = ToyWorld()
        service = RolloutService(
            empty_node(),
            {"toy": here.family()},
            renderer,
            pool,
            ServiceSettings(**settings),
            clock=clock,
            fleet=fleet,
        )
        await service.start()
        sites.append(Site(renderer, given, service, fleet, pool, here, clock))
        return sites[-1]

    yield make
    for site in sites:
        await site.service.stop()
        await site.fleet.aclose()
        for node in site.nodes.values():
            await node.gone()
        await site.pool.aclose()
        for world in (site.here, *site.worlds.values()):
            assert world.open == 0, "an environment was not closed"
