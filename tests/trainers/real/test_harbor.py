"""Exported trajectories, read by Harbor's own validator and models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.exports.formats import ExportFormat, export
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.result_files import located_results
from prorl_envs.trainers.asking import connect_sync
from tests.trainers.conftest import task, toy_service
from tests.viewer.conftest import result, written

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def problems(path: Path) -> str:
    """Return the output of Harbor's validator; "" for a valid file."""
    done = subprocess.run(
        [sys.executable, "-m", "harbor.utils.trajectory_validator", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr if done.returncode else ""


def test_rollouts_of_a_service_are_valid(tmp_path: Path) -> None:
    from harbor.models.trajectories import Trajectory

    with toy_service("solve=2,wrong=1,error500=1,garbage=1") as toy, connect_sync(toy.url) as client:
        client.submit([GroupRequest(id="g", environment="toy", task=task(), samples=10)])
        source = written(tmp_path / "results.jsonl", *client.follow(["g"]))
    export(located_results(source), ExportFormat.ATIF, tmp_path / "atif")
    paths = sorted((tmp_path / "atif").rglob("*.json"))
    assert len(paths) > 5 and not [text for text in map(problems, paths) if text]
    for path in paths:
        read = Trajectory.model_validate_json(path.read_text())
        assert read.to_json_dict()["extra"] == json.loads(path.read_text())["extra"]
        assert read.agent.tool_definitions is not None and len(read.agent.tool_definitions) == 2
        if read.extra is not None and read.extra["reward"] is not None:
            metrics = [step.metrics for step in read.steps if step.source == "agent"]
            assert metrics and all(one is not None and one.completion_token_ids for one in metrics)


def test_unusual_conversations_are_valid(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "[1]"}}
    messages = [
        {"role": "tool", "tool_call_id": "c0", "content": "before any step"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c9", "content": "of no call"},
        {"role": "user", "content": ""},
    ]
    source = written(tmp_path / "results.jsonl", result("g/0"), result("g/1", messages=messages))
    export(located_results(source), ExportFormat.ATIF, tmp_path / "atif")
    assert [problems(tmp_path / "atif" / "g" / f"{number}.json") for number in (0, 1)] == ["", ""]


def test_the_validator_detects_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"schema_version": "ATIF-v1.7", "steps": []}')
    assert "agent: required field is missing" in problems(tmp_path / "bad.json")
