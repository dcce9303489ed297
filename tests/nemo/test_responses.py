"""Results as rows for NeMo RL: the tokens of each call, in rows that continue each other."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.nemo.responses import check_contiguous, output_items, usage
from prorl_envs.rollout.api.types import JobState, Result, Trajectory, TurnRecord
from prorl_envs.rollout.client.trajectory_checks import NotContiguous, check_trajectory


def turn(start: int, end: int) -> TurnRecord:
    return TurnRecord(
        start=start, end=end, finish_reason="stop", weight_version="1", server="s", model_s=0.1, tools_s=0.1
    )


def trajectory(*turns: tuple[int, int], length: int) -> Trajectory:
    mask = [int(any(start <= i < end for start, end in turns)) for i in range(length)]
    return Trajectory(
        ids=list(range(100, 100 + length)),
        loss_mask=mask,
        logprobs=[-0.5 * bit for bit in mask],
        turns=[turn(*span) for span in turns],
    )


def result(messages: list[dict[str, Any]], of: Trajectory | None) -> Result:
    return Result(
        job_id="g/0",
        group_id="g",
        sample=0,
        environment="toy",
        task_id="t",
        state=JobState.DONE,
        reward=1.0,
        mask_sample=False,
        stop_reason=None,
        failure=None,
        messages=messages,
        trajectory=of,
    )


def answer(content: str, *calls: str) -> dict[str, Any]:
    tool_calls = [
        {"id": f"c-{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in calls
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": tool_calls} if calls else {})


def tool_result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c-{name}", "name": name, "content": f"{name} done"}


PROMPT: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "example"},
    answer("an example answer"),
    {"role": "user", "content": "do it"},
]


def test_each_model_call_carries_its_tokens_on_its_last_item() -> None:
    conversation = [
        answer("Now.", "ls", "cat"),
        tool_result("ls"),
        tool_result("cat"),
        {"role": "user", "content": "note"},
        answer(""),
    ]
    items = output_items(result(PROMPT + conversation, trajectory((4, 7), (9, 10), length=10)))
    kinds = [item["type"] for item in items]
    outputs = ["function_call_output"] * 2
    assert kinds == ["message", "function_call", "function_call", *outputs, "message", "message"]
    assert [number for number, item in enumerate(items) if "generation_token_ids" in item] == [2, 6]
    assert items[2]["prompt_token_ids"] == [100, 101, 102, 103]
    assert items[2]["generation_token_ids"] == [104, 105, 106]
    assert items[2]["generation_log_probs"] == [-0.5] * 3
    assert items[6]["prompt_token_ids"] == list(range(100, 109))
    assert items[3] == {"type": "function_call_output", "call_id": "c-ls", "output": "ls done"}
    assert items[5]["content"] == "note"


def test_a_job_without_a_model_call_has_no_items() -> None:
    assert output_items(result(PROMPT, None)) == []
    assert output_items(result(PROMPT, trajectory(length=4))) == []
    assert usage(None)["total_tokens"] == 0


def test_usage_counts_the_tokens_of_each_call() -> None:
    counted = usage(trajectory((4, 7), (9, 10), length=10))
    assert (counted["input_tokens"], counted["output_tokens"], counted["total_tokens"]) == (13, 4, 17)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6))
def test_any_trajectory_of_the_ledger_is_one_row(steps: list[tuple[int, int]]) -> None:
    spans, length = [], 0
    for observed, sampled in steps:
        spans.append((length + observed, length + observed + sampled))
        length = spans[-1][1]
    items = output_items(result([*PROMPT, *(answer("x") for _ in steps)], trajectory(*spans, length=length)))
    row = [*items[-1]["prompt_token_ids"], *items[-1]["generation_token_ids"]]
    assert row == list(range(100, 100 + length))
    check_contiguous(items)


def test_a_retokenised_history_is_refused_with_its_position() -> None:
    items = output_items(result([*PROMPT, answer("a"), answer("b")], trajectory((4, 7), (9, 10), length=10)))
    items[1]["prompt_token_ids"][5] += 1
    with pytest.raises(NotContiguous, match=r"model call 1 differs from the history at token 5 of 7"):
        check_contiguous(items)
    items[1]["prompt_token_ids"] = [100, 101]
    with pytest.raises(NotContiguous, match=r"at token 2 of 7"):
        check_contiguous(items)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (trajectory((4, 7), (6, 9), length=10), "after 7"),
        (trajectory((4, 7), (9, 12), length=10), "of 10 tokens"),
        (trajectory((4, 7), length=10).model_copy(update={"loss_mask": [0] * 10}), "loss mask"),
        (trajectory((4, 7), length=10).model_copy(update={"logprobs": [0.0]}), "differ in length"),
    ],
)
def test_an_inconsistent_trajectory_is_refused(broken: Trajectory, why: str) -> None:
    with pytest.raises(NotContiguous, match=why):
        check_trajectory(broken)


def test_answers_missing_from_the_conversation_are_detected() -> None:
    with pytest.raises(NotContiguous, match="2 model calls, but 1 answers"):
        output_items(result(PROMPT, trajectory((4, 7), (9, 10), length=10)))
