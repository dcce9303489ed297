"""Every known harness, unmodified, from its registry: real tasks in sandboxes without a network, through the
service and with the scripted model. Installs what is missing into the cache; `make test-harnesses`."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.catalog import Catalog
from prorl_envs.cli.demo import Chosen, script
from prorl_envs.config import Settings
from prorl_envs.env.harness.install import install
from prorl_envs.env.harness.recipes import RECIPES
from prorl_envs.env.node import Node, default_cache_dir
from prorl_envs.errors import EnvironmentFault
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.servers import Servers
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.types import AgentLimits, GroupRequest, Result, StopReason
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.rollout.endpoint.conftest import check_rows

pytestmark = [pytest.mark.anyio, pytest.mark.harnesses, pytest.mark.timeout(1800)]

#: One instance of the example data, which is rebuilt from its source release.
INSTANCE = "psf__requests-2931"


async def played(driver: BubblewrapDriver, environment: str, harness: str, row: dict[str, Any]) -> Result:
    """One rollout, with a model that samples other tokenisations than the template's."""
    cache = default_cache_dir()
    try:
        await install(RECIPES[harness], cache, print)
    except EnvironmentFault as error:
        pytest.skip(f"cannot be installed here: {error}")
    settings = Settings.model_validate({"environments": {environment: {"agent": harness}}})
    family = Catalog.of(settings).family(environment)
    book = script([Chosen(environment, row, family.load(row))])
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedServer(book, noncanonical=0.2))
        pool = ModelPool(Servers.of(builtin_renderer()).connect)
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        node = Node(driver, cache)
        service = RolloutService(node, {environment: family}, builtin_renderer(), pool)
        await service.start()
        stack.push_async_callback(service.stop)
        limits = AgentLimits(max_tokens=500_000, run_s=300)
        await service.submit([GroupRequest(id="g", environment=environment, task=row, limits=limits)])
        page = await service.results(0, limit=1, wait_s=1200)
        assert server.counts.violations == 0
        return page.results[0]


def check(result: Result) -> None:
    assert result.failure is None, result.failure
    assert result.reward == 1.0 and result.stop_reason is StopReason.FINISHED and not result.mask_sample
    check_rows(result.rows)
    assert len(result.rows[-1].turns) >= 2, "the task's own conversation is one row"
    assert all(row.parent is None for row in result.rows)


@pytest.mark.parametrize("harness", RECIPES)
async def test_a_shell_task(driver: BubblewrapDriver, harness: str) -> None:
    path = Path(__file__).parents[3] / "envs" / "bash" / "data" / "example.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    check(await played(driver, "bash", harness, row))


@pytest.mark.parametrize("harness", ["mini-swe-agent", "codex", "claude-code"])
async def test_an_issue_of_a_repository(driver: BubblewrapDriver, harness: str) -> None:
    path = Path(__file__).parents[3] / "envs" / "swebench" / "data" / "example.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    check(await played(driver, "swebench", harness, next(r for r in rows if r["instance_id"] == INSTANCE)))
