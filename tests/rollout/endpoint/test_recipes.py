"""Every known harness, unmodified, from its registry: real tasks in sandboxes without a network, with the
scripted model. `make test-harnesses` runs these tests; they install missing harnesses into the cache."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.catalog import Catalog
from prorl_envs.cli.commands.demo import Chosen, script
from prorl_envs.config import Settings
from prorl_envs.env.harness.install import install
from prorl_envs.env.harness.recipes import RECIPES
from prorl_envs.env.node import Node, default_cache_dir
from prorl_envs.errors import EnvironmentFault
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, StopReason
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.rollout.endpoint.conftest import check_rows
from tests.support.timed_server import TimedServer

pytestmark = [pytest.mark.anyio, pytest.mark.harnesses, pytest.mark.timeout(1800)]

#: One instance of the example data, rebuilt from its source release.
INSTANCE = "psf__requests-2931"


async def played(driver: BubblewrapDriver, environment: str, harness: str, row: dict[str, Any]) -> Result:
    """Run one rollout with a model that samples another tokenisation than the template's."""
    cache = default_cache_dir()
    try:
        await install(RECIPES[harness], cache, print)
    except EnvironmentFault as error:
        pytest.skip(f"cannot be installed here: {error}")
    settings = Settings.model_validate({"environments": {environment: {"agent": harness}}})
    family = Catalog.of(settings).family(environment)
    book = script([Chosen(environment, row, family.load(row))])
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(TimedServer(book, noncanonical=0.2))
        pool = ModelPool(Servers.of(builtin_renderer()).connect)
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        node = Node(driver, cache)
        service = RolloutService(node, {environment: family}, builtin_renderer(), pool)
        await service.start()
        stack.push_async_callback(service.stop)
        limits = AgentLimits(max_tokens=500_000, run_s=300)
        await service.groups.submit([GroupRequest(id="g", environment=environment, task=row, limits=limits)])
        page = await service.feed.page(0, limit=1, wait_s=1200)
        [result] = page.results
        # A prompt that does not continue the last one is a row of its own; otherwise tokens were lost.
        assert server.counts.violations <= len(result.rows) - 1
        return result


def check(result: Result) -> None:
    assert result.failure is None, result.failure
    assert result.reward == 1.0 and result.stop_reason is StopReason.FINISHED and not result.mask_sample
    check_rows(result.rows)


def check_unbroken(result: Result) -> None:
    check(result)
    assert len(result.rows[-1].turns) >= 2, "the task's own conversation is one row"
    assert all(row.parent is None for row in result.rows)


@pytest.mark.parametrize("harness", RECIPES)
async def test_a_shell_task(driver: BubblewrapDriver, harness: str) -> None:
    path = Path(__file__).parents[3] / "envs" / "bash" / "data" / "example.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    check_unbroken(await played(driver, "bash", harness, row))


def issue() -> dict[str, Any]:
    path = Path(__file__).parents[3] / "envs" / "swebench" / "data" / "example.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return next(row for row in rows if row["instance_id"] == INSTANCE)


@pytest.mark.parametrize("harness", ["mini-swe-agent", "codex"])
async def test_an_issue_of_a_repository(driver: BubblewrapDriver, harness: str) -> None:
    check_unbroken(await played(driver, "swebench", harness, issue()))


async def test_a_harness_that_rewrites_the_models_calls(driver: BubblewrapDriver) -> None:
    """Claude Code drops a `cd` into the current directory from the calls in its history, so the model
    continues from other text than it sampled: two rows, and the sampled tokens stay unchanged."""
    result = await played(driver, "swebench", "claude-code", issue())
    check(result)
    said, answered = result.rows
    renderer = builtin_renderer()
    assert "cd /testbed && git apply" in renderer.decode(said.ids)
    assert "cd /testbed && git apply" not in renderer.decode(answered.ids)
    assert sum(said.loss_mask) > 100 and sum(answered.loss_mask) > 0
