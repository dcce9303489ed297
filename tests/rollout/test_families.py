"""The families that judge answers and programs, end to end through the service with the scripted model."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments, example_path
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.vllm import VllmClient
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.server import serving
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.types import GroupRequest
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import Mix, ScriptBook
from prorl_envs.testing.server import ScriptedServer

pytestmark = pytest.mark.anyio

FAMILIES = ("code", "math", "stem")


def first_row(name: str) -> dict[str, Any]:
    row = json.loads(example_path(name).read_text().splitlines()[0])
    assert isinstance(row, dict)
    return row


async def test_references_score_one_and_others_nothing(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    rows = {name: first_row(name) for name in FAMILIES}
    book = ScriptBook.from_tapes(
        {row["instruction"]: [[c] for c in row["reference"]] for row in rows.values()}
    )
    async with AsyncExitStack() as stack:
        mix = Mix.parse("solve=1,wrong=1")
        server = await stack.enter_async_context(ScriptedServer(book, mix=mix, renderer=renderer))
        pool = ModelPool(
            lambda url: VllmClient(url, stop_ids=renderer.stop_ids, vocab_size=renderer.vocab_size)
        )
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        known = {name: environments()[name] for name in FAMILIES}
        service = RolloutService(Node(driver, tmp_path), known, renderer, pool, ServiceSettings(run=4))
        client = await stack.enter_async_context(
            RolloutClient(await stack.enter_async_context(serving(service)))
        )
        groups = [GroupRequest(id=name, environment=name, task=row, samples=2) for name, row in rows.items()]
        await client.submit(groups)
        results = [result async for result in client.follow(list(FAMILIES))]
    assert [result.failure for result in results] == [None] * 6
    rewards = {name: sorted(r.reward or 0.0 for r in results if r.group_id == name) for name in FAMILIES}
    assert rewards == {name: [0.0, 1.0] for name in FAMILIES}
    assert all(result.trajectory is not None and result.trajectory.drift == 0 for result in results)
