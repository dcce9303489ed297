"""Agents outside the service: an episode's endpoint at the service's address, with the episode's key."""

import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.rows import read_tasks
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import NotFound, OutOfOrder
from prorl_envs.rollout.api.interactive import CallRequest, CallStep, EpisodeRequest, TokenStep
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import ScriptBook
from tests.rollout.endpoint.conftest import check_rows
from tests.support.timed_server import TimedServer
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

TOKEN = "a token of sixteen or more"
ROOT = Path(__file__).parents[3]
TASK = {"id": "t", "instruction": "Say it."}
MESSAGES: list[Any] = [{"role": "user", "content": "Say it."}]


def new_service(renderer: TemplateRenderer, **settings: Any) -> RolloutService:
    model = ToyModel(renderer, lambda *_: "It.")
    family = ToyWorld().family()
    return RolloutService(empty_node(), {"toy": family}, renderer, model, ServiceSettings(**settings))


def locked() -> ServerSettings:
    return ServerSettings(port=0, token=SecretStr(TOKEN))


async def test_an_episode_with_the_callers_own_agent(renderer: TemplateRenderer) -> None:
    async with serving(new_service(renderer), locked()) as url, RolloutClient(url, token=TOKEN) as client:
        await client.start_episode(EpisodeRequest(id="a", environment="toy", task=TASK))
        endpoint = await client.open_endpoint("a")
        assert endpoint == await client.open_endpoint("a"), "asking again gives the same"
        async with openai.AsyncOpenAI(
            base_url=endpoint.openai_base_url, api_key=endpoint.key, max_retries=0
        ) as model:
            said = await model.chat.completions.create(model="m", messages=MESSAGES)
            assert said.choices[0].message.content == "It."
            call = CallRequest(name="say", arguments={"text": "It."})
            await client.run_episode("a", CallStep(tool_calls=[call]))
            history = [
                *MESSAGES,
                {"role": "assistant", "content": "It."},
                {"role": "user", "content": "Again."},
            ]
            await model.chat.completions.create(model="m", messages=history)
            with pytest.raises(OutOfOrder):
                await client.run_episode("a", TokenStep(ids=[1]))
            result = (await client.evaluate_episode("a")).result
            assert result is not None and result.reward == 1.0 and not result.mask_sample
            (row,) = result.rows
            check_rows([row])
            assert len(row.turns) == 2
            with pytest.raises(openai.AuthenticationError):
                await model.chat.completions.create(model="m", messages=MESSAGES)


async def test_keys_open_endpoints_and_nothing_else(renderer: TemplateRenderer) -> None:
    async with serving(new_service(renderer), locked()) as url, RolloutClient(url, token=TOKEN) as client:
        await client.start_episode(EpisodeRequest(id="a", environment="toy", task=TASK))
        key = (await client.open_endpoint("a")).key
        async with httpx.AsyncClient(base_url=url) as raw:
            for path, token, status in [
                ("/v1/status", key, 401),
                ("/v1/episodes/a", key, 401),
                ("/agent/v1/models", key, 200),
                ("/agent/v1/models", TOKEN, 401),
                ("/agent/v1/models", "x", 401),
            ]:
                answer = await raw.get(path, headers={"authorization": f"Bearer {token}"})
                assert answer.status_code == status, path
        await client.close_episode("a")
        with pytest.raises(NotFound):
            await client.open_endpoint("a")


async def test_an_episode_driven_by_tokens_has_no_endpoint(renderer: TemplateRenderer) -> None:
    async with serving(new_service(renderer)) as url, RolloutClient(url) as client:
        await client.start_episode(EpisodeRequest(id="a", environment="toy", task=TASK))
        await client.run_episode(
            "a", TokenStep(ids=renderer.assistant({"role": "assistant", "content": "x"}))
        )
        with pytest.raises(OutOfOrder):
            await client.open_endpoint("a")


async def test_the_example_runs_unmodified(
    shared_driver: BubblewrapDriver, renderer: TemplateRenderer, tmp_path: Path
) -> None:
    """OpenAI's own client with a service and the scripted model."""
    task = read_tasks(BashEnvironment.load, ROOT / "envs" / "bash" / "data" / "example.jsonl")[0]
    tape = [[{"tool": call.tool, "arguments": call.arguments}] for call in task.reference]
    book = ScriptBook.from_tapes({task.instruction: tape})
    pool = ModelPool(Servers.of(renderer).connect)
    async with TimedServer(book, noncanonical=0.3) as server:
        pool.add(server.url)
        node = Node(shared_driver, tmp_path)
        service = RolloutService(node, {"bash": BashEnvironment}, renderer, pool)
        async with serving(service) as url:
            command = [sys.executable, "-W", "error", str(ROOT / "examples" / "agents" / "outside.py"), url]
            example = await create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
            said, wrong = await example.communicate()
        await pool.aclose()
    assert example.returncode == 0, wrong.decode()
    assert "drift 0" in said.decode() and "reward 1.0" in said.decode(), said.decode()
    assert server.counts.violations == 0
