"""SFT rows: complete conversations, calls in the format of chat templates, and filters."""

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.exports.columns import Written
from prorl_envs.exports.formats import LOW_REWARD, NO_MESSAGES, NO_REWARD, ExportFormat, export
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.result_files import located_results
from tests.exports.conftest import TOOLS
from tests.viewer.conftest import result, written


def exported(source: Path, **options: Any) -> tuple[Written, list[dict[str, Any]]]:
    target = source.with_name("sft.jsonl")
    outcome = export(located_results(source), ExportFormat.SFT, target, **options)
    return outcome, [json.loads(line) for line in target.read_text().splitlines()]


def test_messages_and_tools_are_kept(source: Path, results: list[Result]) -> None:
    outcome, rows = exported(source)
    assert outcome.rollouts == 3 and outcome.left_out == {NO_REWARD: 1}
    assert json.loads(rows[0]["tools"]) == TOOLS
    calls = [call for message in rows[0]["messages"] for call in message.get("tool_calls", ())]
    assert calls[0]["function"] == {"name": "bash", "arguments": {"command": "git diff"}}
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    assert rows[0]["messages"] == results[0].messages[:-1]


def test_low_rewards_are_omitted(source: Path) -> None:
    outcome, rows = exported(source, min_reward=0.5)
    assert outcome.rollouts == len(rows) == 2
    assert outcome.left_out == {NO_REWARD: 1, LOW_REWARD: 1}


def test_a_conversation_ends_with_the_model(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Hello?"}
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    conversations = [
        [user],
        [user, thought, user],
        [parts, {"role": "assistant", "content": "b", "unknown": 1}],
    ]
    source = written(
        tmp_path / "results.jsonl",
        *(result(f"g/{number}", messages=messages) for number, messages in enumerate(conversations)),
    )
    outcome, rows = exported(source)
    assert outcome.rollouts == 2 and outcome.left_out == {NO_MESSAGES: 1}
    assert rows[0]["messages"] == [user, {**thought, "content": ""}]
    assert rows[1]["messages"] == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_hugging_face_loads_every_field_unchanged(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    _, rows = exported(source)
    path = str(source.with_name("sft.jsonl"))
    loaded = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == rows
