"""Complete episodes of the families with the scripted model, in the service and with gymnasium."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments, example_path
from prorl_envs.env.runner import Runner
from prorl_envs.gym.env import TaskEnv
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import ScriptBook
from tests.support.sandbox_entry import LIGHT_TEMPLATES
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

FAMILIES = ("bash", "code", "ipython", "math", "stem")
#: Measured parts of the graders' evidence, which differ from run to run; a log has the duration of its tests.
MEASURED = frozenset({"seconds", "memory", "log_tail"})


def first_row(name: str) -> dict[str, Any]:
    row = json.loads(example_path(name).read_text().splitlines()[0])
    assert isinstance(row, dict)
    return row


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "families", [FAMILIES, pytest.param(("swebench",), marks=pytest.mark.thorough)], ids=["quick", "swebench"]
)
async def test_references_score_one_and_others_zero(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path, families: tuple[str, ...]
) -> None:
    rows = {name: first_row(name) for name in families}
    tasks = [environments()[name].load(row) for name, row in rows.items()]
    book = ScriptBook.from_tapes(
        {task.instruction: [[call.model_dump()] for call in task.reference] for task in tasks}
    )
    async with AsyncExitStack() as stack:
        mix = "solve=1,wrong=1"
        server = await stack.enter_async_context(TimedServer(book, mix=mix, renderer=renderer))
        pool = ModelPool(
            lambda url: VllmClient(url, stop_ids=renderer.stop_ids, vocab_size=renderer.vocab_size)
        )
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        known = {name: environments()[name] for name in families}
        service = RolloutService(Node(driver, tmp_path), known, renderer, pool, ServiceSettings(run=4))
        client = await stack.enter_async_context(
            RolloutClient(await stack.enter_async_context(serving(service)))
        )
        groups = [GroupRequest(id=name, environment=name, task=row, samples=2) for name, row in rows.items()]
        await client.submit(groups)
        results = [result async for result in client.follow(list(families))]
    assert [result.failure for result in results] == [None] * 2 * len(families)
    rewards = {name: sorted(r.reward or 0.0 for r in results if r.group_id == name) for name in families}
    assert rewards == {name: [0.0, 1.0] for name in families}
    assert all(result.trajectory is not None and result.trajectory.drift == 0 for result in results)
    played = await asyncio.to_thread(through_gymnasium, rows, tmp_path)
    assert {r.environment: reproducible_parts(r) for r in results if r.reward} == played


def reproducible_parts(result: Result) -> dict[str, Any]:
    """Return the parts of a service's result that must be reproducible."""
    calls = [call["function"] for message in result.messages for call in message.get("tool_calls", ())]
    return {
        "prompt": result.messages[:2],
        "tools": result.tools,
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
        "observations": [message["content"] for message in result.messages if message["role"] == "tool"],
        "reward": result.reward,
        "components": result.components,
        "evidence": steady(result.evidence),
    }


def through_gymnasium(rows: dict[str, dict[str, Any]], cache: Path) -> dict[str, dict[str, Any]]:
    """Return the same parts of gymnasium episodes that use the references as actions, by family."""
    runner = Runner(lambda: Node(BubblewrapDriver(templates=LIGHT_TEMPLATES), cache))
    try:
        return {name: stepped(name, row, runner) for name, row in rows.items()}
    finally:
        runner.close()


def stepped(name: str, row: dict[str, Any], runner: Runner) -> dict[str, Any]:
    env = TaskEnv(name, tasks=[row], runner=runner)
    try:
        _, info = env.reset(seed=1)
        prompt, tools, observations = info["messages"], info["tools"], []
        reference = environments()[name].load(row).reference
        for call in reference:
            action = json.dumps({"name": call.tool, "arguments": call.arguments})
            observation, reward, terminated, truncated, info = env.step(action)
            observations.append(observation)
        assert terminated and not truncated
    finally:
        env.close()
    return {
        "prompt": prompt,
        "tools": tools,
        "calls": [(call.tool, call.arguments) for call in reference],
        "observations": observations[:-1],  # the loop stops with the finish call
        "reward": reward,
        "components": info["grade"]["components"],
        "evidence": steady(info["grade"]["evidence"]),
    }


def steady(value: Any) -> Any:
    """Return `value` without measured times."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items() if key not in MEASURED}
    return [steady(inner) for inner in value] if isinstance(value, list) else value
