"""Conversion of NeMo Gym rows to tasks, and of conversations to responses."""

from typing import Any

import pytest

from prorl_envs.env.responses import chat_messages, output_items, said_messages
from prorl_envs.errors import InputError
from prorl_envs.remote.task import NemoTask, read_row
from tests.support.resources import desk_row


def row(given: Any, **params: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given, **params}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {}, **fields}


def test_every_kind_of_input_becomes_chat_messages() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Weather "}, {"type": "input_text", "text": "?"}],
        },
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "cold"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    assert chat_messages({"input": given, "instructions": "You help."}) == [
        {"role": "system", "content": "You help.\n\nBe brief."},
        {"role": "user", "content": "Weather ?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({}, "responses_create_params: missing"),
        ({"responses_create_params": []}, "responses_create_params: missing"),
        (row(None), "input: a text or a list"),
        (row([]), "input: a text or a list"),
        (row([3]), "input[0]: an object"),
        (row([{"role": "wizard", "content": "x"}]), "input[0].role: 'wizard'"),
        (row([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0]: not a text"),
        (row([{"type": "computer_call"}]), "input[0].type: 'computer_call'"),
        (row([{"type": "function_call", "name": 3}]), "input[0].name: a text"),
        (row("x", tools=[{"type": "web_search"}]), "tools[0]: not a function"),
        (row("x", tools=[tool("../verify")]), "cannot be a tool"),
        (row("x", tools=[tool("verify")]), "cannot be a tool"),
        (row("x", tools=[tool("a"), tool("a")]), "is there twice"),
        (row("x") | {"reference": [{"tool": 3}]}, "reference.0.tool"),
    ],
)
def test_a_wrong_row_names_its_field(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        read_row(bad)
    assert says in caught.value.message


def test_a_row_has_its_own_id_or_one_of_its_content() -> None:
    assert read_row(desk_row(id=12)).id == "12"
    assert read_row(desk_row(uuid="u-1")).id == "u-1"
    assert read_row(desk_row(verifier_metadata={"task": {"id": "greet"}})).id == "greet"
    assert read_row(desk_row(start=1)).id == read_row(desk_row(start=1)).id != read_row(desk_row(start=2)).id


def test_the_row_is_kept_except_for_its_solution() -> None:
    given = desk_row(say="x", reference=[{"tool": "read", "arguments": {}}], reference_answer="3")
    task = read_row(given)
    assert task.row == {k: v for k, v in given.items() if k not in ("reference", "reference_answer")}
    assert (task.reference[0].tool, task.reference_answer) == ("read", "3")
    assert set(NemoTask.model_json_schema()["required"]) == {"responses_create_params"}


def test_reasoning_is_separate_and_ids_are_unique() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "<think>hm</think>\n\nI look.", "tool_calls": [call]},
        {"role": "tool", "content": "cold"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "user", "content": "Your call could not be read."},
    ]
    items = output_items(messages, ["cold", "warm"])
    kinds = [item["type"] for item in items]
    assert kinds[:4] == ["reasoning", "message", "function_call", "function_call_output"]
    assert kinds[4:] == ["function_call", "function_call", "function_call_output"]
    assert items[1]["content"][0]["text"] == "I look."
    ids = [item["call_id"] for item in items if item["type"] == "function_call"]
    assert len(set(ids)) == 3 and ids[0] == items[3]["call_id"] and ids[1] == items[6]["call_id"]


def test_an_empty_answer_is_still_a_message() -> None:
    (item,) = output_items([{"role": "assistant", "content": ""}])
    assert item["content"][0]["text"] == ""


def test_parsed_items_are_the_conversation() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
        {"role": "assistant", "content": "Cold."},
    ]
    assert said_messages(output_items(messages)) == messages
    assert said_messages([]) == []
