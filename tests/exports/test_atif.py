"""Trajectories in ATIF. Harbor's own validator reads them in tests/trainers/real/test_harbor.py."""

import json
from pathlib import Path
from typing import Any

from prorl_envs.exports.atif import atif_of
from prorl_envs.exports.formats import NO_MESSAGES, ExportFormat, export
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.result_files import located_results
from prorl_envs.runs.folder import RunDescription
from tests.exports.conftest import TOOLS
from tests.viewer.conftest import DIFF, result

RUN = RunDescription(name="r", environment="bash", model="qwen", started="2026-11-25", version="1.2")


def document(one: Result) -> dict[str, Any]:
    found = atif_of(one, RUN)
    assert found is not None
    return found


def test_each_conversation_is_a_document(source: Path, tmp_path: Path) -> None:
    outcome = export(located_results(source), ExportFormat.ATIF, tmp_path / "atif", run=RUN)
    assert outcome.rollouts == 3 and outcome.left_out == {NO_MESSAGES: 1}
    found = {str(path.relative_to(tmp_path / "atif")) for path in (tmp_path / "atif").rglob("*.json")}
    assert found == {"run/bash/fix-it/0.json", "run/bash/fix-it/1.json", "run/math-solver/sum/0.json"}
    read = json.loads((tmp_path / "atif/run/bash/fix-it/0.json").read_text())
    assert read["agent"]["model_name"] == "qwen" and read["extra"]["reward"] == 1.0


def test_steps_have_calls_observations_and_tokens() -> None:
    made = document(result(tools=TOOLS))
    assert made["agent"] == {
        "name": "prorl-envs", "version": "1.2", "model_name": "qwen", "tool_definitions": TOOLS
    }  # fmt: skip
    assert [step["source"] for step in made["steps"]] == ["system", "user", "agent", "agent"]
    step = made["steps"][2]
    assert step["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "git diff"}}
    ]
    assert step["observation"] == {"results": [{"source_call_id": "c1", "content": DIFF}]}
    assert step["metrics"]["completion_token_ids"] == [76, 77, 78]
    assert step["metrics"]["logprobs"] == [-0.01, -1.0, -4.0]
    assert (step["metrics"]["prompt_tokens"], made["steps"][3]["metrics"]["prompt_tokens"]) == (4, 9)
    assert made["final_metrics"] == {
        "total_prompt_tokens": 13, "total_completion_tokens": 6, "total_steps": 4
    }  # fmt: skip


def test_no_call_is_attributed_to_the_wrong_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = document(result(messages=messages))
    assert "metrics" not in made["steps"][1] and made["final_metrics"]["total_completion_tokens"] == 6


def test_text_that_was_tokenised_again_has_no_token_ids() -> None:
    one = result()
    assert one.trajectory is not None
    inexact = one.trajectory.model_copy(update={"token_exact": False})
    made = document(one.model_copy(update={"trajectory": inexact}))
    assert made["steps"][2]["metrics"]["completion_tokens"] == 3
    assert "completion_token_ids" not in made["steps"][2]["metrics"]


def test_unusual_calls_and_observations() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "[1]"}}
    messages = [
        {"role": "tool", "tool_call_id": "c0", "content": "before any step"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c9", "content": "of no call"},
    ]
    steps = document(result(environment="bash@codeact", messages=messages))["steps"]
    assert [step["source"] for step in steps] == ["user", "agent"]
    assert steps[1]["tool_calls"][0] == {
        "tool_call_id": "c1", "function_name": "bash", "arguments": {}, "extra": {"arguments": "[1]"}
    }  # fmt: skip
    assert steps[1]["reasoning_content"] == "hm"
    assert steps[1]["observation"]["results"] == [{"content": "of no call", "extra": {"tool_call_id": "c9"}}]
    assert document(result(environment="bash@codeact"))["agent"]["name"] == "codeact"
