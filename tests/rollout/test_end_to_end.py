"""The complete system: HTTP, service, scripted model server, bubblewrap sandboxes, shell tasks."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments
from prorl_envs.errors import FailureKind
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, JobState, Result, StopReason
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import ScriptBook
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

TASK = {
    "id": "sum",
    "instruction": "Write the sum of the numbers in numbers.txt to sum.txt.",
    "files": {"numbers.txt": "1\n2\n3\n"},
    "checks": [{"type": "file_equals", "path": "sum.txt", "text": "6\n"}],
}
BOOK = ScriptBook.from_tapes(
    {
        TASK["instruction"]: [  # type: ignore[dict-item]
            [{"tool": "bash", "arguments": {"command": "cat numbers.txt"}}],
            [{"tool": "bash", "arguments": {"command": "paste -sd+ numbers.txt | sed 's/.*/$((&))/' >e"}}],
            [{"tool": "bash", "arguments": {"command": 'eval echo "$(cat e)" >sum.txt; rm e'}}],
            [{"tool": "finish", "arguments": {}}],
        ]
    }
)


@asynccontextmanager
async def running(
    driver: BubblewrapDriver, renderer: TemplateRenderer, folder: Path, mix: str
) -> AsyncIterator[tuple[RolloutClient, TimedServer]]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            TimedServer(BOOK, mix=mix, renderer=renderer, noncanonical=0.2)
        )
        pool = ModelPool(
            lambda url: VllmClient(
                url,
                stop_ids=renderer.stop_ids,
                vocab_size=renderer.vocab_size,
                limits=ClientLimits(attempts=1),
            )
        )
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        service = RolloutService(
            Node(driver, folder),
            {"bash": environments()["bash"]},
            renderer,
            pool,
            ServiceSettings(init=2, run=8, eval=2),
        )
        url = await stack.enter_async_context(serving(service))
        client = await stack.enter_async_context(RolloutClient(url))
        yield client, server


def group(name: str, samples: int, **limits: float) -> GroupRequest:
    return GroupRequest(
        id=name,
        environment="bash",
        task=TASK,
        samples=samples,
        limits=AgentLimits.model_validate({"max_turns": 8, **limits}),
    )


async def collect(client: RolloutClient, *groups: GroupRequest) -> list[Result]:
    await client.submit(groups)
    return [result async for result in client.follow([group.id for group in groups])]


async def test_every_behaviour_has_the_expected_outcome(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    mix = "solve=3,wrong=1,idle=1,malformed=1,loop=1,bad_ids=1"
    async with running(driver, renderer, tmp_path, mix) as (client, server):
        results = await collect(client, group("mixed", 8))
        statistics = (await client.group("mixed")).statistics
        assert server.counts.violations == 0, "the server saw a prompt that is not what it sampled before"
    assert statistics is not None
    assert sorted(reward for reward in statistics.rewards if reward is not None) == [0, 0, 0, 0, 1, 1, 1]
    assert statistics.informative
    assert statistics.failures == {FailureKind.MODEL: 1}
    [failed] = [result for result in results if result.failure]
    assert failed.reward is None
    assert failed.mask_sample
    reasons = {result.stop_reason for result in results}
    assert reasons >= {StopReason.FINISHED, StopReason.MALFORMED, StopReason.TURN_LIMIT}
    for result in results:
        assert result.trajectory is not None
        assert result.trajectory.drift == 0
        if result.reward == 1:
            assert len(result.trajectory.turns) == 4
            assert "1\n2\n3" in next(m["content"] for m in result.messages if m["role"] == "tool")


async def test_cancelling_at_random_moments_leaves_no_sandbox(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    chance = random.Random(7)
    async with running(driver, renderer, tmp_path, "solve=2,loop=1,hang=1") as (client, _):
        groups = [group(f"g{i}", 4, max_turns=1000, max_tokens=200_000) for i in range(6)]
        await client.submit(groups)
        jobs = [f"{group.id}/{i}" for group in groups for i in range(4)]
        for job in chance.sample(jobs, len(jobs)):
            for _ in range(chance.randrange(3)):
                await client.status()
            await client.cancel_job(job)
        results = [result async for result in client.follow([group.id for group in groups])]
        assert sorted(result.job_id for result in results) == sorted(jobs)
        assert {result.state for result in results} <= {JobState.DONE, JobState.CANCELLED}
        while (await client.status()).jobs_with_sandbox:
            pass
        assert (await client.status()).close_failures == 0


async def test_closing_while_everything_runs_leaves_no_sandbox(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(driver, renderer, tmp_path, "hang=1") as (client, server):
        await client.submit([group("g", 12)])
        await server.until(lambda counts: counts.running >= 8)
