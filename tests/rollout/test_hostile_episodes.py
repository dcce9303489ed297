"""Hostile and broken agents in real sandboxes: a typed outcome, and other episodes are unaffected."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments
from prorl_envs.errors import FailureKind
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, StopReason
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import ScriptBook
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

#: Command that the agent of each task runs before it finishes.
AGENTS = {
    "solver": "echo yes >answer",
    "hung": "echo begun; sleep 600",
    "asker": "echo begun; cat",
    "deaf": "trap '' INT TERM; echo begun; while :; do sleep 1; done",
    "killer": "echo yes >answer; kill -9 -1; kill -9 $$",
    "leaver": "echo yes >answer; exit 3",
    "vandal": "rm -rf /usr /etc /workspace/* ~/* 2>/dev/null; echo gone >/workspace/other",
    "flooder": "yes | head -c 5000000; echo yes >answer",
    "forger": "PATH=/workspace:$PATH; test() { :; }; printf '#!/bin/sh\\nexit 0\\n' >grep; chmod +x grep",
    "lingerer": "(sleep 60; echo yes >answer) & disown",
}


def instruction(name: str) -> str:
    return f"Task of the {name}: write yes into the file answer."


def request(name: str, **changes: object) -> GroupRequest:
    check = {"type": "command", "name": "says yes", "command": "grep -qx yes answer && test -f answer"}
    row = {"id": name, "instruction": instruction(name), "checks": [check], **changes}
    limits = AgentLimits(max_turns=4, max_tokens=200_000, tool_timeout_s=3.0)
    return GroupRequest(id=name, environment="bash", task=row, limits=limits)


@asynccontextmanager
async def running(
    driver: BubblewrapDriver, renderer: TemplateRenderer, folder: Path, agents: Mapping[str, str]
) -> AsyncIterator[RolloutClient]:
    tapes = {
        instruction(name): [[{"tool": "bash", "arguments": {"command": command}}]]
        for name, command in agents.items()
    }
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(TimedServer(ScriptBook.from_tapes(tapes), renderer=renderer))
        pool = ModelPool(lambda url: VllmClient(url, stop_ids=renderer.stop_ids))
        stack.push_async_callback(pool.aclose)
        pool.add(model.url)
        service = RolloutService(Node(driver, folder), environments(), renderer, pool)
        url = await stack.enter_async_context(serving(service))
        yield await stack.enter_async_context(RolloutClient(url))


async def outcomes(client: RolloutClient, *groups: GroupRequest) -> dict[str, Result]:
    await client.submit(groups)
    return {r.group_id: r async for r in client.follow([group.id for group in groups])}


def observation(result: Result) -> str:
    return next(str(m["content"]) for m in result.messages if m["role"] == "tool")


async def test_each_agent_is_graded_on_its_own_files(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(driver, renderer, tmp_path, AGENTS) as client:
        came = await outcomes(client, *(request(name) for name in AGENTS))
    assert {name: result.failure for name, result in came.items() if result.failure} == {}
    assert {result.stop_reason for result in came.values()} == {StopReason.FINISHED}
    scores = {name for name, result in came.items() if result.reward == 1}
    assert scores == {"solver", "killer", "leaver", "flooder"}, "these did leave the right answer"
    assert {result.reward for name, result in came.items() if name not in scores} == {0}

    assert "begun" in observation(came["hung"]) and "timed out" in observation(came["hung"])
    assert "begun" in observation(came["asker"]) and "waits for input" in observation(came["asker"])
    assert "begun" in observation(came["deaf"]) and "killed" in observation(came["deaf"])
    assert "killed by signal 9" in observation(came["killer"])
    assert "exited with status 3" in observation(came["leaver"])
    assert len(observation(came["flooder"])) < 100_000


async def test_a_check_that_hangs_is_a_failed_check(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """A hanging check runs the agent's code, so the grader counts it as failed."""
    hangs = {"type": "command", "name": "hangs", "command": "sleep 1000", "timeout_s": 0.5}
    agents = {"endless": "echo yes >answer", "solver": AGENTS["solver"]}
    async with running(driver, renderer, tmp_path, agents) as client:
        came = await outcomes(client, request("endless", checks=[hangs]), request("solver"))
    assert (came["solver"].reward, came["endless"].reward) == (1, 0)
    assert came["endless"].evidence["checks"][0]["timed_out"] is True


async def test_a_grader_that_fails_gives_no_reward(
    driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    agents = {"unlucky": "echo yes >answer", "solver": AGENTS["solver"]}
    no_pattern = {"type": "file_matches", "path": "answer", "pattern": "("}
    unlucky = request("unlucky", checks=[no_pattern])
    async with running(driver, renderer, tmp_path, agents) as client:
        came = await outcomes(client, unlucky, request("solver"))
    failure = came["unlucky"].failure
    assert failure is not None and failure.kind is FailureKind.GRADER
    assert (came["unlucky"].reward, came["unlucky"].mask_sample) == (None, True)
    assert came["solver"].reward == 1
