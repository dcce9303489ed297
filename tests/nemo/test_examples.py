"""The files that NeMo Gym requires of every server: complete, consistent, and equal on every machine."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl_envs.cli.commands.new import FLAVOURS, new
from prorl_envs.env.registry import example_path
from prorl_envs.errors import InputError
from prorl_envs.nemo.examples import (
    CASES,
    COUNT,
    EXAMPLE,
    METRICS,
    ROLLOUTS,
    example_rollouts,
    example_rows,
    read_jsonl,
    verifier_cases,
    write_examples,
    write_jsonl,
)
from prorl_envs.nemo.rows import BUILT_IN, agent_name, blank, server_name

ENVS = Path(__file__).resolve().parents[2] / "envs"
NEW = tuple(f"lab_{flavour}" for flavour in FLAVOURS)
SPDX = re.compile(r"\A# SPDX-FileCopyrightText: .+\n# SPDX-License-Identifier: Apache-2\.0\n")
#: Traces of the machine and the time of recording.
LOCAL = re.compile(
    r"/(?:root|home|tmp|work|Users)/|127\.0\.0\.1|localhost|\b20\d\d-\d\d-\d\dT|"
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d|\bin \d+\.\d+ ?s"
)


@pytest.fixture(scope="module", params=[*BUILT_IN, *NEW])
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def nemo(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder `nemo` of a family, or of a new package."""
    if name in BUILT_IN:
        return ENVS / name / "nemo"
    return new(name, name.removeprefix("lab_"), tmp_path_factory.mktemp("new")) / "nemo"


@pytest.fixture(scope="module")
def server(nemo: Path) -> Path:
    return nemo / "server"


def test_there_are_five_rows_with_a_rollout_each(server: Path, name: str) -> None:
    rows, rollouts = read_jsonl(server / EXAMPLE), read_jsonl(server / ROLLOUTS)
    assert len(rows) == len(rollouts) == COUNT == 5
    if name in BUILT_IN:
        assert rows == example_rows(blank(name), example_path(name)), "write them: scripts/nemo-examples.sh"
    for number, (row, rollout) in enumerate(zip(rows, rollouts, strict=True)):
        assert row["agent_ref"] == {"type": "responses_api_agents", "name": agent_name(name)}
        task = row["verifier_metadata"]["task"]
        assert rollout["task_id"] == task.get("id", task.get("instance_id"))
        assert (rollout["_ng_task_index"], rollout["environment"], rollout["reward"]) == (number, name, 1.0)
        assert rollout["agent_ref"] == row["agent_ref"]
        asked, played = (one["responses_create_params"]["input"] for one in (row, rollout))
        assert [message["content"] for message in asked] == [message["content"] for message in played]
        assert rollout["response"]["output"][-1]["type"] == "message"


def test_the_verifiers_cases_match_the_first_rollout(server: Path) -> None:
    cases = read_jsonl(server / CASES)
    assert cases == verifier_cases(read_jsonl(server / EXAMPLE)[0], read_jsonl(server / ROLLOUTS)[0])
    assert {case["kind"] for case in cases} == {"full_reward", "zero_reward", "malformed", "determinism"}


def test_the_metrics_match_the_rows(server: Path, name: str) -> None:
    metrics = json.loads((server / METRICS).read_text())
    assert metrics["Number of examples"] == COUNT
    assert metrics["jsonl_fpath"] == f"resources_servers/{server_name(name)}/{EXAMPLE}"
    tools = [len(row["responses_create_params"]["tools"]) for row in read_jsonl(server / EXAMPLE)]
    assert metrics["Number of tools"]["Average"] == sum(tools) / COUNT


def test_recorded_files_contain_no_place_or_time(server: Path) -> None:
    for rollout in read_jsonl(server / ROLLOUTS):
        assert rollout["response"]["created_at"] == 0
        recorded = {key: value for key, value in rollout.items() if key != "responses_create_params"}
        assert not LOCAL.findall(json.dumps(recorded["response"]["output"]))
    assert not LOCAL.findall((server / METRICS).read_text())


def test_local_traces_are_detected() -> None:
    for text in (
        "/root/x",
        "/tmp/y",
        "2026-11-25T13:00",
        "Nov 25 13:21",
        "3 passed in 0.15s",
        "http://127.0.0.1:1",
    ):
        assert LOCAL.search(text), text
    assert not LOCAL.search("/workspace/a in 3 steps")


def test_every_file_with_comments_has_a_licence(nemo: Path) -> None:
    files = [path for path in nemo.rglob("*") if path.suffix in {".py", ".yaml", ".txt"}]
    assert len(files) >= 6
    for path in files:
        assert SPDX.match(path.read_text()), path


def test_the_datasets_have_licences_and_the_manifest_mirrors_the_configuration(nemo: Path, name: str) -> None:
    known = {"Apache 2.0", "MIT"}
    main = f"resources_servers/{server_name(name)}/configs/{server_name(name)}.yaml"
    for path in nemo.glob("server/configs/*.yaml"):
        config = yaml.safe_load(path.read_text())
        if "config_paths" in config:  # it adds an environment server
            assert config["config_paths"] in (
                [main],
                [main.replace(f"{server_name(name)}.yaml", "gymnasium.yaml")],
            )
            continue
        datasets = [
            dataset
            for block in config.values()
            for agent in block.get("responses_api_agents", {}).values()
            for dataset in agent["datasets"]
        ]
        assert {dataset["type"] for dataset in datasets} == {"train", "validation", "example"}
        assert {dataset["license"] for dataset in datasets} <= known
    config, manifest = (
        yaml.safe_load((nemo / "environment" / part).read_text()) for part in ("config.yaml", "manifest.yaml")
    )
    (example,) = config[agent_name(name)]["responses_api_agents"]["simple_agent"]["datasets"]
    assert example["license"] in known
    assert manifest["datasets"] == [{key: example[key] for key in ("name", "type", "jsonl_fpath")}]
    assert (manifest["name"], manifest["resources_server"]) == (server_name(name), server_name(name))
    assert manifest["licensing"] in {"Apache-2.0", "Apache-2.0 AND MIT"}
    assert config["config_paths"] == [main.replace(f"{server_name(name)}.yaml", "single_agent_turn.yaml")]


def test_the_server_exports_a_fixture_and_has_a_test(server: Path, name: str) -> None:
    tree = ast.parse((server / "app.py").read_text())
    (assigned,) = (node for node in tree.body if isinstance(node, ast.Assign))
    assert ast.unparse(assigned) == f"VERIFIER_FIXTURE = verifier_fixture({name!r}, __file__)"
    tests = ast.parse((server / "tests" / "test_app.py").read_text())
    assert len([node for node in tests.body if isinstance(node, ast.FunctionDef)]) == 1


@pytest.mark.parametrize("family", BUILT_IN)
def test_the_readme_names_the_licence_of_the_data(family: str) -> None:
    text = (ENVS / family / "README.md").read_text()
    assert "## Licence\n" in text and "Apache-2.0" in text.partition("## Licence\n")[2]


def test_rollouts_of_other_rows_are_refused(tmp_path: Path) -> None:
    recorded = read_jsonl(ENVS / "bash" / "nemo" / "server" / ROLLOUTS)
    for wrong, says in (
        (recorded[:4], "not one rollout for each"),
        ([recorded[0] | {"reward": 0.5}, *recorded[1:]], "is 0.5, not 1"),
    ):
        write_jsonl(tmp_path / "out.jsonl", wrong)
        with pytest.raises(InputError, match=says):
            write_examples("bash", tmp_path / "server", tmp_path / "out.jsonl")


def test_rollouts_are_written_in_order_and_without_measurements(tmp_path: Path) -> None:
    recorded = read_jsonl(ENVS / "bash" / "nemo" / "server" / ROLLOUTS)
    measured: list[dict[str, Any]] = [
        one
        | {
            "evidence": one["evidence"] | {"log_tail": "in 3 s", "cases": [{"seconds": 0.1, "exit": 0}]},
            "response": one["response"] | {"created_at": 1.0},
        }
        for one in reversed(recorded)
    ]
    settled = example_rollouts(measured)
    assert [one["task_id"] for one in settled] == [one["task_id"] for one in recorded]
    assert settled[0]["evidence"] == recorded[0]["evidence"] | {"cases": [{"exit": 0}]}
    assert settled[0]["response"] == recorded[0]["response"]


def test_too_few_tasks_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(example_path("bash").read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(InputError, match="4 tasks"):
        example_rows(blank("bash"), source)


def test_rows_end_at_line_feeds_only(tmp_path: Path) -> None:
    rows = [{"a": "b\u2028c\u2029d\x85"}, {"a": "e"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), "utf-8")
    assert read_jsonl(path) == rows
