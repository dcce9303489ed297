"""A client of the paper's server, as it is: it sends no token, starts, processes, and stops."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.rollout.api import create_app
from prorl_envs.testing.toy import ToyModel

pytestmark = pytest.mark.anyio


class PaperClient:
    """What the clients in the paper's repository do: plain requests, and a look at status and body."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        response = await self._http.post(path, json=body) if body else await self._http.post(path)
        return response.status_code, response.json()

    async def process(self, name: str = "t", **options: Any) -> tuple[int, dict[str, Any]]:
        instance = {"data_source": "toy", "instance_id": name, "trajectory_id": 3, "instruction": "Do it."}
        instance |= {key: options.pop(key) for key in ("faults", "reward", "data_source") if key in options}
        params = {
            "model": "hosted_vllm/model",
            "api_key": "a-secret-key",
            "modify_params": False,
            "native_tool_calling": True,
            "temperature": 0.6,
            "top_p": 0.9,
            "max_iterations": 4,
            "max_output_tokens": 300,
        }
        return await self.post("/process", {"instance": instance, "sampling_params": params, **options})


@pytest.fixture
def pool(renderer: TemplateRenderer) -> ModelPool:
    def play(session: str, turn: int) -> list[dict[str, Any]]:
        say = {"tool": "say", "arguments": {"text": f"turn {turn}"}}
        return [say, say] if turn == 0 else [{"tool": "finish", "arguments": {}}]

    return ModelPool(lambda _: ToyModel(renderer, play))


@pytest.fixture
async def paper(make_bench: Any, pool: ModelPool) -> AsyncIterator[tuple[PaperClient, Any]]:
    bench = await make_bench(model=pool)
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield PaperClient(http), bench
    await pool.aclose()


@pytest.fixture
async def started(paper: tuple[PaperClient, Any]) -> tuple[PaperClient, Any]:
    client, bench = paper
    assert (await client.post("/add_llm_server", {"address": "http://127.0.0.1:1/v1"}))[0] == 200
    assert (await client.post("/start"))[0] == 200
    return client, bench


async def test_a_rollout_comes_back_in_the_papers_shape(started: tuple[PaperClient, Any]) -> None:
    client, bench = started
    status, result = await client.process("task", job_id="mine")
    assert status == 200
    assert {
        "instance_id": "task",
        "trajectory_id": 3,
        "success": True,
        "resolved": True,
    }.items() <= result.items()
    assert (result["critical_error"], result["error"], result["filter"]) == (None, None, False)
    assert (result["finish"], result["end_properly"], result["reward"]) == (True, True, 1.0)
    assert set(result["timing"]) == {
        *("init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "timeout_triggered")
    }
    assert [tool["function"]["name"] for tool in result["tools"]] == ["say", "finish"]
    messages = result["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["tool_calls"][0]["name"] == "say"
    [kept] = await bench.finished(1)
    assert kept.trajectory is not None
    assert [i for message in messages for i in message["token_ids"]] == kept.trajectory.ids
    for message in messages:
        sampled = message["role"] == "assistant"
        assert (message["logprobs"] is not None) == sampled
        assert message["input_ids"] is None
        if sampled:
            assert len(message["logprobs"]) == len(message["token_ids"]) > 0
    request = (await bench.service.store.group(kept.group_id)).request
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.6, 300)
    assert request.limits.max_turns == 4
    assert "a-secret-key" not in request.model_dump_json()
    assert (await client.process("task", job_id="mine"))[1] == result, "the same job is not done twice"
    assert await bench.finished(1) == [kept]


async def test_many_at_once_as_its_client_sends_them(started: tuple[PaperClient, Any]) -> None:
    client, _ = started
    answers = await asyncio.gather(*(client.process(f"t{i}", reward=i % 2) for i in range(16)))
    assert {status for status, _ in answers} == {200}
    assert [result["resolved"] for _, result in answers] == [i % 2 == 1 for i in range(16)]


@pytest.mark.parametrize(
    ("faults", "stage"),
    [({"init": "environment"}, "init"), ({"call": "crash"}, "run"), ({"eval": "grader"}, "eval")],
)
async def test_a_failure_is_marked_and_filtered(
    started: tuple[PaperClient, Any], faults: dict[str, str], stage: str
) -> None:
    status, result = await started[0].process(faults=faults)
    assert status == 200
    assert (result["critical_error"], result["filter"], result["resolved"]) == (stage, True, False)
    assert result["error"]
    assert result["reward"] is None


async def test_a_stop_ends_its_own_rollouts_and_no_others(started: tuple[PaperClient, Any]) -> None:
    client, bench = started
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group("others"))
    processing = asyncio.create_task(client.process("mine"))
    cancelled = asyncio.create_task(client.process("other", job_id="c"))
    await bench.world.until(lambda: bench.world.inside["call"] == 3)
    status = (await client.post("/cancel", {"job_id": "c"}))[0]
    assert (status, (await cancelled)[1]["critical_error"]) == (200, "cancelled")
    assert (await client.post("/stop"))[0] == 200
    assert (await processing)[1]["critical_error"] == "cancelled"
    assert (await bench.service.job("others/0")).state == "run"
    bench.world.gates["call"].set()


async def test_what_it_is_told_when_it_cannot_be_done(paper: tuple[PaperClient, Any]) -> None:
    client, bench = paper
    for path in ("/stop", "/cancel", "/process"):
        body = {"job_id": "x", "instance": {}}
        status, answer = await client.post(path, body if path != "/stop" else None)
        assert (status, set(answer)) == (503, {"detail"}), path
    await client.post("/start")
    assert (await client.post("/start"))[0] == 400
    status, answer = await client.process()
    assert (status, "no model server" in answer["detail"]) == (503, True)
    await client.post("/add_llm_server", {"address": "http://127.0.0.1:1"})
    assert (await client.post("/add_llm_server", {"address": "file:///etc/passwd"}))[0] == 400
    for options in ({"data_source": "os.system"}, {"faults": {"x": "y"}}, {"data_source": ["toy"]}):
        status, answer = await client.process(**options)
        assert (status, set(answer)) == (400, {"detail"})
    assert (await client.post("/cancel", {"job_id": "never"}))[0] == 404
    assert (await client.post("/clear_llm_server"))[0] == 200
    assert (await client.process())[0] == 503
    await bench.service.drain()
    await client.post("/add_llm_server", {"address": "http://127.0.0.1:1"})
    status, answer = await client.process()
    assert (status, "draining" in answer["detail"]) == (503, True)


async def test_they_may_be_left_out(bench: Any) -> None:
    app = create_app(bench.service, ServerSettings(paper_routes=False))
    assert not [
        path
        for path in app.openapi()["paths"]
        if not path.startswith(("/v1/", "/health", "/ready", "/metrics"))
    ]
