"""An unmodified client of the paper's server: it sends no token, starts, processes and stops."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.http.app import create_app
from tests.support.toy import ToyModel

pytestmark = pytest.mark.anyio


class PaperClient:
    """Client like those in the paper's repository, with plain requests and checks of status and body."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        response = await self.http.post(path, json=body) if body else await self.http.post(path)
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


async def test_a_rollout_is_returned_in_the_papers_format(started: tuple[PaperClient, Any]) -> None:
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


async def test_many_concurrent_requests_as_its_client_sends_them(started: tuple[PaperClient, Any]) -> None:
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


async def test_a_stop_cancels_only_its_own_rollouts(started: tuple[PaperClient, Any]) -> None:
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
    assert (await bench.service.groups.job("others/0")).state == "run"
    bench.world.gates["call"].set()


async def test_errors_name_their_reason(paper: tuple[PaperClient, Any]) -> None:
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


async def test_an_empty_column_of_a_merged_table_is_ignored(started: tuple[PaperClient, Any]) -> None:
    client, _ = started
    row = '{"data_source": "toy", "instance_id": null, "trajectory_id": NaN, "id": "a", "instruction": "b", '
    headers = {"Content-Type": "application/json"}

    async def process(rest: str) -> httpx.Response:
        content = f'{{"instance": {row}{rest}}}}}'
        return await client.http.post("/process", content=content, headers=headers)

    response = await process('"other": NaN')
    assert response.status_code == 200, response.text
    result = response.json()
    assert (result["instance_id"], result["trajectory_id"], result["resolved"]) == ("a", None, True)
    response = await process('"other": [NaN]')
    assert (response.status_code, "NaN" in response.json()["detail"]) == (400, True)


async def test_the_operator_names_data_sources(make_bench: Any, pool: ModelPool) -> None:
    bench = await make_bench(model=pool)
    app = create_app(bench.service, ServerSettings(paper_sources={"chess/*": "toy", "deepscaler": "toy"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        client = PaperClient(http)
        await client.post("/add_llm_server", {"address": "http://127.0.0.1:1/v1"})
        await client.post("/start")
        for source in ("chess/openings", "deepscaler"):
            status, result = await client.process(source, data_source=source)
            assert (status, result["resolved"]) == (200, True)
        status, answer = await client.process(data_source="deepcoder/train")
        assert (status, "'code', which is not available" in answer["detail"]) == (400, True)
    await pool.aclose()
    with pytest.raises(InputError, match=r"server\.paper_sources: 'go' stands for 'board'"):
        create_app(bench.service, ServerSettings(paper_sources={"go": "board"}))


async def test_the_paper_routes_can_be_disabled(bench: Any) -> None:
    app = create_app(bench.service, ServerSettings(paper_routes=False))
    assert not [
        path
        for path in app.openapi()["paths"]
        if not path.startswith(("/v1/", "/health", "/ready", "/metrics"))
    ]
