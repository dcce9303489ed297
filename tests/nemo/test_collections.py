"""Resources servers of a real NeMo Gym, and our servers run by NeMo Gym, as environments of our service."""

import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
import nemo_gym

from prorl_envs.catalog import Catalog
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path
from prorl_envs.env.rows import rows
from prorl_envs.nemo.rows import blank, nemo_row
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.nemo.conftest import free_port
from tests.nemo.gym import prepared_root, started
from tests.support.toy import Play, ToyModel, empty_node

pytestmark = [pytest.mark.nemo, pytest.mark.anyio, pytest.mark.timeout(600)]

SERVERS = Path(nemo_gym.__file__).parent.parent / "resources_servers"
OURS = ("bash", "ipython", "swebench")
#: Folder of each started server, by the name of its instance, and changes to its YAML block.
INSTANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "counter": ("example_session_state_mgmt", {}),
    "quiz": ("mcqa", {}),
    "lenient": ("mcqa", {"grading_mode": "lenient_boxed"}),
    "weather": ("example_single_tool_call", {}),
    **{f"ours_{name}": (f"prorl_{name}", {}) for name in OURS},
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Run the servers with `gym env start`, without agents and models; yield their URLs by instance."""
    root = prepared_root(tmp_path_factory.mktemp("gym"))
    config, urls = {}, {}
    for instance, (folder, changes) in INSTANCES.items():
        port = int(free_port())
        block = shipped_block(folder) | changes | {"host": "127.0.0.1", "port": port}
        config[instance] = {"resources_servers": {folder: block}}
        urls[instance] = f"http://127.0.0.1:{port}"
        if not (environment := root.path / "venvs" / "resources_servers" / folder / ".venv").exists():
            environment.parent.mkdir(parents=True)
            environment.symlink_to(sys.prefix)
    path = root.path / "servers.yaml"
    path.write_text(yaml.safe_dump(config))
    with (root.path / "gym.log").open("w") as log, started(root, log, "--config", str(path)):
        yield urls


def shipped_block(folder: str) -> dict[str, Any]:
    """Return the block of a resources server in its YAML file."""
    config = yaml.safe_load((SERVERS / folder / "configs" / f"{folder}.yaml").read_text())
    (block,) = [entry["resources_servers"] for entry in config.values() if "resources_servers" in entry]
    found: dict[str, Any] = block[folder]
    return found


def example(name: str, number: int = 0) -> dict[str, Any]:
    lines = (SERVERS / name / "data" / "example.jsonl").read_text().splitlines()
    row: dict[str, Any] = json.loads(lines[number])
    return row


def offering(**entries: Any) -> Catalog:
    return Catalog.of(Settings.model_validate({"environments": entries}))


@asynccontextmanager
async def service(catalog: Catalog, node: Node, play: Play) -> AsyncIterator[RolloutService]:
    renderer = builtin_renderer()
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


async def test_servers_shipped_with_nemo_gym_run_through_our_stages(urls: Mapping[str, str]) -> None:
    names = ("counter", "quiz", "weather")
    tasks = {name: example(INSTANCES[name][0]) for name in names}
    catalog = offering(**{name: {"nemo": {"url": urls[name]}} for name in names})
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


@pytest.mark.parametrize("name", OURS)
async def test_our_own_servers_return_the_same_as_the_family_in_process(
    name: str, urls: Mapping[str, str]
) -> None:
    """The same task, solved and untouched, with and without NeMo Gym."""
    picked = [row for _, row in rows(example_path(name))][: 1 if name == "swebench" else 3]
    tasks = [blank(name).load(row) for row in picked]
    if reason := blank(name).unavailable(tasks[0]):
        pytest.skip(reason)
    entry = {"nemo": {"url": urls[f"ours_{name}"], "finish_tool": "finish"}}
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


async def test_a_row_with_a_reference_is_validated(urls: Mapping[str, str]) -> None:
    solution = {
        "reference": [
            {"tool": "increment_counter", "arguments": {"count": 1}},
            {"tool": "increment_counter", "arguments": {"count": 2}},
        ]
    }
    quiz = {"reference_answer": "\\boxed{B}"}
    offered = offering(**{name: {"nemo": {"url": urls[name]}} for name in ("counter", "lenient")})
    for name, more in (("counter", solution), ("lenient", quiz)):
        family = offered[name]
        task = family.load(example(INSTANCES[name][0]) | more)
        (verdict,) = await validate(family, empty_node(), [task])
        assert verdict.ok, verdict.findings
        assert (verdict.reference, verdict.untouched) == ((1.0, 1.0), 0.0)
