"""Batches over HTTP and through the client: equal, typed and bounded."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_envs.config import ServerSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.batches import BatchRequest, BatchState
from prorl_envs.rollout.api.errors import Conflict, NotFound
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.service.service import RolloutService
from tests.rollout.batches.batch_bench import PacedModel, batch, rows
from tests.rollout.http.test_app import anything, error_of, http
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio


@pytest.fixture
def model(renderer: TemplateRenderer) -> PacedModel:
    return PacedModel(renderer)


@pytest.fixture
async def bench(make_bench: Callable[..., Any], model: PacedModel) -> Any:
    return await make_bench(model=model)


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[RolloutClient]:
    app = create_app(bench.service, ServerSettings())
    async with RolloutClient("http://127.0.0.1", transport=httpx.ASGITransport(app), attempts=1) as client:
        yield client


async def test_a_trainer_reads_exactly_its_groups(client: RolloutClient, model: PacedModel) -> None:
    name = "run-1/step.2"
    model.hold(f"{name}/0")
    request = batch(name, groups=2, in_flight=3, tasks=3, metadata={"step": 2})
    for _ in range(2):
        assert (await client.submit_batch(request)).wanted == 2
    read = [result async for result in client.batch_results(name)]
    groups = await client.batch_groups(name)
    assert groups.state is BatchState.COMPLETE
    assert [result.job_id for result in read] == [job for group in groups.groups for job in group.job_ids]
    assert [result.reward for result in read] == [r for group in groups.groups for r in group.rewards]
    assert {result.group_id for result in read} == {f"{name}/1", f"{name}/2"}
    assert {result.batch_id for result in read} == {name}
    assert {result.metadata["step"] for result in read} == {2}
    assert (await client.group(f"{name}/1")).batch_id == name
    assert [view.id for view in await client.batches()] == [name]
    assert (await client.batch(name, wait_s=5)).cancelled == 1


async def test_the_documented_trainer_trains(renderer: TemplateRenderer) -> None:
    page = (Path(__file__).parents[3] / "docs" / "batches.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    small = code.replace("groups=64", "groups=3").replace("in_flight=80", "in_flight=5")
    assert small.count("=3,") == small.count("=5,") == 1
    names: dict[str, Any] = {}
    exec(small, names)
    toy = ToyWorld().family()
    service = RolloutService(empty_node(), {"bash": toy}, renderer, PacedModel(renderer))
    await service.start()
    steps: list[list[Result]] = []

    async def train(results: list[Result]) -> int:
        steps.append(results)
        return len(steps)

    tasks = [[row.task for row in rows(9, first=step)] for step in range(4)]
    app = create_app(service, ServerSettings())
    async with RolloutClient("http://127.0.0.1", transport=httpx.ASGITransport(app), attempts=1) as client:
        await names["steps"](client, tasks, train)
        views = await client.batches()
    assert [len({result.group_id for result in results}) for results in steps] == [3] * 4
    read = [result.job_id for results in steps for result in results]
    assert len(read) == len(set(read)), "no sample is trained on twice"
    assert sum(view.carried_over for view in views) == sum(view.carried_in for view in views)
    await service.stop()


async def test_results_arrive_while_the_batch_runs(client: RolloutClient, model: PacedModel) -> None:
    model.hold("a/1")
    await client.submit_batch(batch(groups=2, tasks=2))
    reading = client.batch_results("a")
    first = [await anext(reading), await anext(reading)]
    assert [result.job_id for result in first] == ["a/0/0", "a/0/1"]
    assert (await client.batch("a")).state is BatchState.RUNNING
    model.release("a/1")
    assert [result.job_id async for result in reading] == ["a/1/0", "a/1/1"]


async def test_a_stream_is_extended_and_closed(client: RolloutClient) -> None:
    await client.submit_batch(batch(tasks=0, groups=2, stream_open=True))
    view = await client.append_tasks("a", rows(1), first=0)
    assert (view.tasks, view.stream_open) == (1, True)
    view = await client.append_tasks("a", rows(1, first=1), first=1, stream_open=False)
    assert (view.tasks, view.stream_open) == (2, False)
    assert (await client.batch("a", wait_s=30)).state is BatchState.COMPLETE
    with pytest.raises(Conflict):
        await client.append_tasks("a", rows(1, first=2), first=2)


async def test_a_batch_is_cancelled(client: RolloutClient, model: PacedModel, bench: Any) -> None:
    model.hold("a/0", "a/1")
    await client.submit_batch(batch(groups=2, tasks=5))
    await bench.world.until(lambda: bench.world.open == 4)
    view = await client.cancel_batch("a")
    assert (view.state, view.cancelled, view.informative) == (BatchState.CANCELLED, 2, 0)
    assert [result async for result in client.batch_results("a")] == []
    for call in (client.batch, client.cancel_batch, client.batch_groups):
        with pytest.raises(NotFound):
            await call("none")


async def test_errors_name_their_place(bench: Any) -> None:
    good = batch().model_dump(mode="json")
    wrong: dict[str, dict[str, Any]] = {
        "min_rewards": {"min_rewards": 3},
        "spread": {"samples": 1},
        "max_staleness": {"max_staleness": 1},
        "itself": {"carry_from": "a"},
        "min_mean": {"filter": {"min_mean": 1, "max_mean": 0}},
        "body.groups": {"groups": 0},
        "body.weight": {"weight": 0},
        "body.id": {"id": "a" * 181},
        "/groups": {"id": "a/groups"},
        "task 0": {"environment": "nowhere"},
        "body.extra": {"extra": 1},
    }
    async with http(bench.service) as client:
        for place, fields in wrong.items():
            error = error_of(await client.post("/v1/batches", json=good | fields))
            assert error["type"] == "invalid_request"
            assert place in error["message"], place
        for query in ("after=-1", "limit=0", "limit=9999", "wait_s=inf"):
            response = await client.get(f"/v1/batches/a/results?{query}")
            assert error_of(response)["type"] == "invalid_request"
        for path in ("a", "a/groups", "a/results"):
            assert error_of(await client.get(f"/v1/batches/{path}"))["type"] == "not_found"
        response = await client.post("/v1/batches/a/tasks", json={"first": 0})
        assert error_of(response)["type"] == "not_found"


FIELDS = set(BatchRequest.model_fields) - {"id", "groups", "environment", "tasks"} | {"x"}
almost = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b/c"]) | anything,
        "groups": st.integers(0, 3) | anything,
        "environment": st.just("toy"),
        "tasks": st.lists(st.fixed_dictionaries({"task": st.just({"id": "t"}) | anything}), max_size=2),
    },
    optional=dict.fromkeys(sorted(FIELDS), anything),
)


def test_no_request_body_makes_the_service_fail(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    model = ToyModel(renderer, lambda *_: "done")
    service = RolloutService(empty_node(), {"toy": world.family()}, renderer, model)
    client = http(service)
    with asyncio.Runner() as runner:
        runner.run(service.start())

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.sampled_from(["", "/a/tasks", "/b/c/tasks"]), anything | almost)
        def post(path: str, content: Any) -> None:
            headers = {"content-type": "application/json"}
            url = f"/v1/batches{path}"
            response = runner.run(client.post(url, content=json.dumps(content), headers=headers))
            if response.status_code != 200:
                known = ("invalid_request", "conflict", "full", "not_found")
                assert error_of(response)["type"] in known

        post()
        runner.run(service.stop())
        runner.run(client.aclose())
