"""The three API shapes, tested with the vendors' own clients."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import ResponseInputParam

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.endpoint.chat import call_of
from tests.rollout.endpoint.conftest import LS, Served, check_rows, toy_endpoint

pytestmark = pytest.mark.anyio

CALL = [{"tool": "ls", "arguments": {"command": "ls -l"}, "content": "I look."}]
TWO = [*CALL, {"tool": "ls", "arguments": {"command": "ls /"}}]


def play(_: str, turn: int) -> Any:
    return TWO if turn == 0 else "All is well."


def openai_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


def anthropic_client(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0)


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": LS, "strict": True}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "ls", "parameters": LS, "strict": False}]
ANTHROPIC_TOOLS: Any = [{"name": "ls", "input_schema": LS}]


def one_row(served: Served) -> None:
    """Check that both turns are one contiguous row, regardless of the client's format of the history."""
    check_rows(served.rows)
    (row,) = served.rows
    assert len(row.turns) == 2 and row.parent is None
    assert sum(row.loss_mask) == sum(turn.end - turn.start for turn in row.turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(stream: bool) -> None:
    async with toy_endpoint(play) as served, openai_client(served) as client:
        messages: list[Any] = [
            {"role": "system", "content": "You look."},
            {"role": "user", "content": [{"type": "text", "text": "What is there?"}]},
        ]
        if stream:
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=CHAT_TOOLS, stream_options={"include_usage": True}
            ) as told:
                said: Any = (await told.get_final_completion()).choices[0].message
        else:
            said = (
                (await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS))
                .choices[0]
                .message
            )
        assert said.content == "I look."
        assert said.tool_calls is not None
        calls = [call for call in said.tool_calls if call.type == "function"]
        assert [json.loads(call.function.arguments)["command"] for call in calls] == ["ls -l", "ls /"]
        messages.append(said.model_dump(exclude_unset=True, exclude={"parsed"}))
        for call in messages[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "total 0"} for call in calls]
        last = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
        assert last.choices[0].message.content == "All is well."
        assert last.choices[0].finish_reason == "stop"
        assert last.usage is not None and last.usage.completion_tokens > 0
        one_row(served)
        assert [m["role"] for m in served.transcript.messages] == [
            *("system", "user", "assistant", "tool", "tool", "assistant")
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(stream: bool) -> None:
    async with toy_endpoint(play) as served, openai_client(served) as client:
        given: ResponseInputParam = [{"role": "user", "content": "What is there?"}]
        asked: dict[str, Any] = {"model": "policy", "instructions": "You look.", "tools": RESPONSES_TOOLS}
        if stream:
            async with client.responses.stream(input=given, **asked) as told:
                kinds = [event.type async for event in told]
                answer: Any = await told.get_final_response()
            assert "response.output_text.delta" in kinds
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        else:
            answer = await client.responses.create(input=given, **asked)
        assert answer.output_text == "I look."
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["command"] for call in calls] == ["ls -l", "ls /"]
        given += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
        given += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "total 0"} for call in calls
        ]
        last = await client.responses.create(input=given, **asked)
        assert last.output_text == "All is well." and last.status == "completed"
        assert last.usage is not None and last.usage.output_tokens > 0
        one_row(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(stream: bool) -> None:
    async with toy_endpoint(play) as served, anthropic_client(served) as client:
        messages: list[Any] = [{"role": "user", "content": "What is there?"}]
        asked: dict[str, Any] = {
            "model": "policy",
            "max_tokens": 500,
            "system": [{"type": "text", "text": "You look.", "cache_control": {"type": "ephemeral"}}],
            "tools": ANTHROPIC_TOOLS,
        }
        if stream:
            async with client.messages.stream(messages=messages, **asked) as told:
                answer = await told.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **asked)
        assert answer.stop_reason == "tool_use"
        text, *calls = answer.content
        assert text.type == "text" and text.text == "I look."
        assert [call.input["command"] for call in calls if call.type == "tool_use"] == ["ls -l", "ls /"]
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "total 0"}
            for call in calls
            if call.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        counted = await client.messages.count_tokens(
            model="policy", messages=messages, system=asked["system"], tools=ANTHROPIC_TOOLS
        )
        last = await client.messages.create(messages=messages, **asked)
        assert last.content[0].type == "text" and last.content[0].text == "All is well."
        assert last.stop_reason == "end_turn"
        assert last.usage.input_tokens == counted.input_tokens
        one_row(served)


async def test_models_are_listed_for_both() -> None:
    async with toy_endpoint(play) as served:
        async with openai_client(served) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
        async with anthropic_client(served) as other:
            assert [model.id async for model in other.models.list()] == ["policy"]


async def test_a_wrong_key_is_refused_in_each_shape() -> None:
    async with toy_endpoint(play) as served:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="sk-none", max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(model="m", input="x")
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "x"}]
                )
        assert served.rows == [] and served.session.refused == 0


async def test_a_truncated_answer_is_marked_in_each_shape() -> None:
    async with toy_endpoint(lambda *_: "a long answer " * 50) as served:
        async with openai_client(served) as client:
            messages: Any = [{"role": "user", "content": "x"}]
            chat = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
            assert chat.choices[0].finish_reason == "length"
            response = await client.responses.create(model="m", input="y", max_output_tokens=3)
            assert response.status == "incomplete"
        async with anthropic_client(served) as other:
            said = await other.messages.create(model="m", max_tokens=3, messages=messages)
            assert said.stop_reason == "max_tokens"
        assert all(turn.end - turn.start == 3 for row in served.rows for turn in row.turns)


async def test_the_rollout_s_own_sampling_is_used() -> None:
    """The trainer's loss assumes the rollout's temperature, so the harness's sampling options are ignored."""
    sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=64)
    async with toy_endpoint(play, sampling=sampling) as served, openai_client(served) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        await client.chat.completions.create(model="m", messages=messages, temperature=0.0, max_tokens=999)
        model: Any = served.session._agent.model
        assert model.samplings["g/0"] == [sampling]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": "y"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]},
        ),
        ("/v1/responses", {"input": [{"type": "telepathy"}]}),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
        ("/v1/responses", {}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": "x"}]}),
        ("/v1/messages", [1, 2]),
    ],
)
async def test_bad_requests_are_refused_with_a_reason(path: str, body: Any) -> None:
    async with toy_endpoint(play) as served, httpx.AsyncClient(base_url=served.url) as client:
        answer = await client.post(path, json=body, headers={"x-api-key": served.key})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert served.session.refused == 1 and served.rows == []


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a":1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ("ls", {"arguments": "ls"}),
        ('"ls"', {"arguments": '"ls"'}),
    ],
)
def test_arguments_in_a_request_become_an_object(given: Any, read: dict[str, Any]) -> None:
    function = call_of("c", "f", given)["function"]
    assert json.loads(function["arguments"]) == read
