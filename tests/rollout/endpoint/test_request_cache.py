"""A cache of parsed requests does not change the result of parsing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.rollout.endpoint.anthropic import Messages
from prorl_envs.rollout.endpoint.chat import ChatCompletions
from prorl_envs.rollout.endpoint.conversation_key import key_of_tools, keys_of
from prorl_envs.rollout.endpoint.request_cache import RequestCache
from prorl_envs.rollout.endpoint.responses import Responses
from prorl_envs.rollout.endpoint.types import EndpointRequest, RequestRefused, Shape

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), Messages()
TEXTS = st.sampled_from(["a", "b", "<|im_end|>", "\n x ", "é", ""])
IDS = st.sampled_from(["1", "2"])


def _function(id_: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": f"f{id_}", "arguments": "{}"}}


def chat_items() -> st.SearchStrategy[Any]:
    said = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS})
    called = IDS.map(lambda n: {"role": "assistant", "content": None, "tool_calls": [_function(n)]})
    result = st.tuples(IDS, TEXTS).map(
        lambda pair: {"role": "tool", "tool_call_id": pair[0], "content": pair[1]}
    )
    return st.one_of(said, called, result)


def responses_items() -> st.SearchStrategy[Any]:
    said = st.fixed_dictionaries(
        {"role": st.sampled_from(["developer", "user", "assistant"]), "content": TEXTS}
    )
    called = IDS.map(lambda n: {"type": "function_call", "call_id": n, "name": f"f{n}", "arguments": "{}"})
    result = st.tuples(IDS, TEXTS).map(
        lambda pair: {"type": "function_call_output", "call_id": pair[0], "output": pair[1]}
    )
    return st.one_of(said, called, result, st.just({"type": "reasoning", "summary": []}))


def messages_items() -> st.SearchStrategy[Any]:
    said = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS})
    used = IDS.map(
        lambda n: {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": n, "name": f"f{n}", "input": {}}],
        }
    )
    result = st.tuples(IDS, TEXTS).map(
        lambda pair: {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": pair[0], "content": pair[1]},
                {"type": "text", "text": "and?"},
            ],
        }
    )
    return st.one_of(said, used, result)


SHAPES: list[tuple[Shape, str, str, Any]] = [
    (CHAT, "messages", "", chat_items()),
    (RESPONSES, "input", "instructions", responses_items()),
    (MESSAGES, "messages", "system", messages_items()),
]


async def outcome(reader: RequestCache, shape: Shape, body: bytes) -> EndpointRequest | str:
    try:
        return await reader.read(shape, body)
    except RequestRefused as refused:
        return refused.message


@given(st.data())
async def test_cached_requests_do_not_change_the_outcome(data: st.DataObject) -> None:
    """Histories of all shapes grow, are cut and are changed anywhere, in any order."""
    known = RequestCache()
    histories: list[Any] = [[] for _ in SHAPES]
    for _ in range(data.draw(st.integers(1, 10))):
        which = data.draw(st.integers(0, len(SHAPES) - 1))
        shape, field, lead, items = SHAPES[which]
        history = histories[which]
        if history and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(history) - 1))
            del history[at:]
        history += data.draw(st.lists(items, min_size=1, max_size=3))
        body: dict[str, Any] = {field: history, "tools": data.draw(st.sampled_from([None, []]))}
        if lead:
            body[lead] = data.draw(TEXTS)
        sent = json.dumps(body).encode()
        mine, fresh = await outcome(known, shape, sent), await outcome(RequestCache(), shape, sent)
        assert mine == fresh
        if isinstance(mine, EndpointRequest):
            assert mine.keys == keys_of(mine.messages) and mine.tools_key == key_of_tools(mine.tools)


async def test_known_messages_are_not_parsed_again() -> None:
    reader, history = RequestCache(), [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "ls"}}]
    one = await reader.read(CHAT, json.dumps({"messages": history, "tools": tools}).encode())
    history += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    two = await reader.read(CHAT, json.dumps({"model": "m", "tools": tools, "messages": history}).encode())
    assert two.messages[0] is one.messages[0] and two.tools is one.tools
    assert len(one.messages) == 1, "nor is it changed"


async def test_an_answer_in_items_is_one_message_that_may_still_grow() -> None:
    reader = RequestCache()
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, call]
    ends = {"role": "user", "content": "c"}
    first = await reader.read(RESPONSES, json.dumps({"input": [*items, ends]}).encode())
    items.append({**call, "call_id": "2"})
    second = await reader.read(RESPONSES, json.dumps({"input": [*items, ends]}).encode())
    assert [len(asked.messages[1]["tool_calls"]) for asked in (first, second)] == [1, 2]


async def test_long_requests_are_parsed_in_a_thread_and_evicted_first() -> None:
    reader = RequestCache()
    for number in range(4):
        text = f"{number}" * 12_000_000
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        assert (await reader.read(CHAT, body)).messages[0]["content"] == text
    assert sum(history.size for history in reader._histories) < 32 << 20


async def test_half_a_surrogate_pair_is_refused() -> None:
    for content in (b'"x\\ud800"', b'"\\ud800 and more of it"'):
        body = b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
        (message,) = (await RequestCache().read(CHAT, body)).messages
        message["content"].encode()
