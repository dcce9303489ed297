"""Resources servers of a real NeMo Gym, and our servers run by NeMo Gym, as environments of our service."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
import nemo_gym

from prorl_envs.catalog import Catalog
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path
from prorl_envs.env.rows import rows
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import blank, nemo_row
from prorl_envs.remote.servers import OwnServer
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import Play, ToyModel, empty_node

pytestmark = [pytest.mark.nemo, pytest.mark.anyio, pytest.mark.timeout(600)]

SERVERS = Path(nemo_gym.__file__).parent.parent / "resources_servers"


def config(name: str) -> str:
    return f"resources_servers/{name}/configs/{name}.yaml"


def example(name: str, number: int = 0) -> dict[str, Any]:
    lines = (SERVERS / name / "data" / "example.jsonl").read_text().splitlines()
    row: dict[str, Any] = json.loads(lines[number])
    return row


def offering(**entries: Any) -> Catalog:
    for entry in entries.values():
        if "nemo" in entry:
            entry["nemo"]["start_s"] = 400
    return Catalog.of(Settings.model_validate({"environments": entries}))


@asynccontextmanager
async def service(catalog: Catalog, node: Node, play: Play) -> AsyncIterator[RolloutService]:
    renderer = builtin_renderer()
    async with catalog:
        serving = RolloutService(node, catalog, renderer, ToyModel(renderer, play), ServiceSettings())
        await serving.start()
        try:
            yield serving
        finally:
            await serving.stop()


async def roll(serving: RolloutService, requests: Sequence[dict[str, Any]]) -> dict[str, Result]:
    await serving.groups.submit([GroupRequest.model_validate(request) for request in requests])
    results: list[Result] = []
    while len(results) < len(requests):
        cursor = results[-1].cursor if results else 0
        results += (await serving.feed.page(cursor, limit=100, wait_s=60)).results
    return {result.group_id: result for result in results}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments}


PLAYS: dict[str, Sequence[Any]] = {
    "counter": [[call("increment_counter", count=1)], [call("increment_counter", count=2)], "It is 6."],
    "miscount": [[call("increment_counter", count=1)], "It is 6."],
    "quiz": ["<think>Not A.</think>\\boxed{B}"],
    "wrong": ["\\boxed{A}"],
    "weather": [[call("get_weather", city="Oslo"), call("get_weather")], "Cold."],
}


async def test_servers_shipped_with_nemo_gym_run_through_our_stages() -> None:
    names = {
        "counter": "example_session_state_mgmt",
        "quiz": "mcqa",
        "weather": "example_single_tool_call",
    }
    tasks = {name: example(folder) for name, folder in names.items()}
    catalog = offering(**{name: {"nemo": {"config": config(folder)}} for name, folder in names.items()})
    of = {"miscount": "counter", "wrong": "quiz"}
    requests = [
        {"id": name, "environment": of.get(name, name), "task": tasks[of.get(name, name)]} for name in PLAYS
    ]
    async with service(
        catalog, empty_node(), lambda session, turn: PLAYS[session.split("/")[0]][turn]
    ) as serving:
        results = await roll(serving, requests)
    assert {name: result.reward for name, result in results.items()} == {
        "counter": 1.0,
        "miscount": 0.0,
        "quiz": 1.0,
        "wrong": 0.0,
        "weather": 1.0,
    }
    assert results["quiz"].evidence["extracted_answer"] == "B"
    told = [m["content"] for m in results["weather"].messages if m["role"] == "tool"]
    assert json.loads(told[0])["weather_description"] == "The weather in Oslo is cold."
    assert "Field required" in told[1]
    assert not any(result.mask_sample for result in results.values())


@pytest.mark.parametrize("name", ["bash", "ipython", "swebench"])
async def test_our_own_servers_return_the_same_as_the_family_in_process(name: str) -> None:
    """The same task, solved and untouched, with and without NeMo Gym."""
    picked = [row for _, row in rows(example_path(name))][: 1 if name == "swebench" else 3]
    tasks = [blank(name).load(row) for row in picked]
    if reason := blank(name).unavailable(tasks[0]):
        pytest.skip(reason)
    entry = {"nemo": {"config": config(f"prorl_{name}"), "finish_tool": "finish"}}
    catalog = offering(**{name: {}, "served": entry})
    requests = []
    for number, row in enumerate(picked):
        for how, task in ((name, row), ("served", nemo_row(blank(name), row))):
            for what in ("solved", "untouched"):
                group = f"{how}:{number}:{what}"
                requests.append({"id": group, "environment": how, "task": task})

    def play(session: str, turn: int) -> Any:
        _, number, what = session.partition("/")[0].split(":")
        reference = tasks[int(number)].reference if what == "solved" else ()
        tape = [call(step.tool, **step.arguments) for step in reference]
        return [(tape if tape and tape[-1]["tool"] == "finish" else [*tape, call("finish")])[turn]]

    async with Node.local() as node, service(catalog, node, play) as serving:
        results = await roll(serving, requests)
    for number in range(len(picked)):
        for what, reward in (("solved", 1.0), ("untouched", 0.0)):
            here, there = (results[f"{how}:{number}:{what}"] for how in (name, "served"))
            assert (here.state, there.state) == (JobState.DONE, JobState.DONE), there.failure
            assert here.reward == there.reward == reward
            assert (here.task_id, here.stop_reason) == (there.task_id, there.stop_reason)
            assert here.messages == there.messages
            assert (here.tools, here.components) == (there.tools, there.components)
            assert here.evidence.keys() == there.evidence.keys()


async def test_a_row_with_a_reference_is_validated() -> None:
    solution = {
        "reference": [
            {"tool": "increment_counter", "arguments": {"count": 1}},
            {"tool": "increment_counter", "arguments": {"count": 2}},
        ]
    }
    quiz = {"reference_answer": "\\boxed{B}"}
    async with offering(
        counter={"nemo": {"config": config("example_session_state_mgmt")}},
        quiz={"nemo": {"config": config("mcqa"), "overrides": {"grading_mode": "lenient_boxed"}}},
    ) as offered:
        for name, folder, more in (
            ("counter", "example_session_state_mgmt", solution),
            ("quiz", "mcqa", quiz),
        ):
            family = offered[name]
            task = family.load(example(folder) | more)
            (verdict,) = await validate(family, empty_node(), [task])
            assert verdict.ok, verdict.findings
            assert (verdict.reference, verdict.untouched) == ((1.0, 1.0), 0.0)


async def test_a_dying_server_fails_its_episode_and_is_replaced_for_the_next() -> None:
    import asyncio
    import os
    import signal

    from prorl_envs.errors import ToolError
    from prorl_envs.remote.environment import nemo_family
    from prorl_envs.tools.types import ToolCall

    server = OwnServer(name="counter", config=config("example_session_state_mgmt"), start_s=400)
    family = nemo_family("counter", server)
    task = family.load(example("example_session_state_mgmt"))
    async with server, family(empty_node()) as first:
        await first.init(task)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(ToolError):
            await first.call(ToolCall("c", "increment_counter", {"count": 1}))
        while server.pid is not None:  # noqa: ASYNC110 - its sockets close before its exit
            await asyncio.sleep(0.01)
        async with family(empty_node()) as second:
            await second.init(task)
            assert (await second.call(ToolCall("c", "get_counter_value", {}))).text == '{"count":3}'


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"config": "resources_servers/nothing.yaml"}, "there is no file"),
        ({"config": config("mcqa"), "instance": "mcq"}, "known: mcqa"),
        ({"config": config("equivalence_llm_judge")}, "does not run here"),
    ],
)
async def test_a_server_that_cannot_be_started_names_the_reason(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        async with offering(x={"nemo": entry}):
            pass
    assert says in str(caught.value) and "environments.x" in caught.value.message
