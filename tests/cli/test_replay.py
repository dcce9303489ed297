"""Replay of stored rollouts: changed grades are reported, and a broken rollout does not stop the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.cli.commands.replay import stored
from prorl_envs.env.base import Prompt
from prorl_envs.env.conversation import MessageLog
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.api.types import Failure, GroupRequest, JobState, Result, Stage, StopReason
from prorl_envs.rollout.client.result_files import read_results
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.tools.types import ToolCall, ToolResult
from tests.cli.conftest import Cli

ROW: dict[str, Any] = {
    "id": "greet",
    "instruction": "Greet.",
    "checks": [{"type": "file_equals", "path": "a", "text": "hello\n", "name": "greeting"}],
}
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}}]


def request(group: str, row: dict[str, Any] = ROW) -> GroupRequest:
    return GroupRequest(id=group, environment="bash", task=row, samples=4)


def result(group: str, sample: int, reward: float | None, *calls: tuple[str, str], **more: Any) -> Result:
    conversation = MessageLog(Prompt([{"role": "user", "content": "Greet."}], ()))
    for command, gave in calls:
        conversation.called(ToolCall("c", "bash", {"command": command}), ToolResult(text=gave))
    conversation.said("Done.")
    given: dict[str, Any] = {
        "job_id": f"{group}/{sample}", "group_id": group, "sample": sample, "environment": "bash",
        "task_id": "greet", "state": JobState.DONE, "reward": reward, "mask_sample": False,
        "stop_reason": StopReason.NO_TOOL_CALL, "failure": None, "messages": list(conversation.messages),
        "components": {} if reward is None else {"greeting": reward}, "tools": TOOLS,
    }  # fmt: skip
    return Result.model_validate({**given, **more})


def test_changes_are_reported_and_bad_rows_skipped(cli: Cli, tmp_path: Path) -> None:
    good = ("echo hello > a; echo ok", "ok\n")
    failure = Failure(kind=FailureKind.GRADER, stage=Stage.EVAL, message="m")
    lost = Failure(kind=FailureKind.MODEL, stage=Stage.RUN, message="m")
    lines = [
        result("g", 0, 1.0, good).model_dump_json(),
        result("g", 1, 0.0, good).model_dump_json(),
        '{"version": 2',
        '{"version": 9}',
        result("g", 2, None, good, state=JobState.FAILED, failure=failure).model_dump_json(),
        result("g", 3, None, state=JobState.FAILED, failure=lost, stop_reason=None).model_dump_json(),
        result("g", 4, 0.0, ("echo other", "before\n")).model_dump_json(),
        result("gone", 0, 1.0, good, task_id="gone").model_dump_json(),
        result("g", 5, 1.0, good, environment="no-such").model_dump_json(),
        result(
            "g", 6, 1.0, messages=[{"role": "assistant", "tool_calls": [{"function": 3}]}]
        ).model_dump_json(),
        result("g", 7, 1.0, tools=[{"function": {"name": "shell"}}]).model_dump_json(),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    (tmp_path / "groups.jsonl").write_text(request("g").model_dump_json())
    done = cli("replay", "results.jsonl", "--out", "again.jsonl")
    assert done.returncode == 1, done.stderr
    said = (
        "8 rollouts scored again: 2 the same, 1 changed, 1 with a first reward, 4 without a new reward; "
        "3 left out"
    )
    assert (
        said in " ".join(done.stdout.split())
        and "in 1 of them, a tool call had another result" in done.stdout
    )
    for words in (
        "results.jsonl:3: ", "results.jsonl:4: ", "g/3: its agent loop did not finish (model)",
    ):  # fmt: skip
        assert words in done.stderr
    flat = " ".join(done.stdout.split())
    for words in (
        "greeting",
        "no task of bash is",
        "no environment is",
        "messages.0.tool_calls.0",
        "'shell'",
    ):
        assert words in flat
    again = {one.job_id: one for one in read_results(tmp_path / "again.jsonl")}
    assert {name: one.reward for name, one in again.items()} == {"g/0": 1, "g/1": 1, "g/2": 1, "g/4": 0}
    changed = again["g/1"]
    assert changed.metadata["replayed"] == {"reward": 0.0, "differing_observations": 0}
    assert (changed.components, changed.mask_sample) == (
        {"greeting": 1.0},
        True,
    )  # no tokens: not to train on


@pytest.mark.anyio
async def test_a_services_store_is_replayed_with_its_own_tasks(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    await store.submit([NewGroup(request("g"), "greet")])
    await store.record(result("g", 0, 1.0))
    await store.aclose()
    found = await stored(str(path))
    assert [one.job_id for one in found.results] == ["g/0"]
    assert found.rows["g"].task == ROW and not found.bad


@pytest.mark.anyio
async def test_an_unreadable_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        await stored(str(tmp_path / "none.jsonl"))
    (tmp_path / "bad.jsonl").write_text(json.dumps([1]))
    assert (await stored(str(tmp_path / "bad.jsonl"))).bad
