"""Parsing of requests."""

import json
from typing import Any

from prorl_envs.rollout.endpoint.chat import ChatCompletions
from prorl_envs.rollout.endpoint.responses import Responses

CHAT, RESPONSES = ChatCompletions(), Responses()


def test_an_answer_in_items_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    items: list[Any] = [*said, call, {**call, "call_id": "2"}, {"role": "user", "content": "c"}]
    request = RESPONSES.read(json.dumps({"input": items}).encode())
    assert [message["role"] for message in request.messages] == ["user", "assistant", "user"]
    assert [called["id"] for called in request.messages[1]["tool_calls"]] == ["1", "2"]


def test_half_a_surrogate_pair_is_replaced() -> None:
    for content in (b'"x\\ud800"', b'"\\ud800 and more of it"'):
        body = b'{"messages": [{"role": "user", "content": ' + content + b"}]}"
        (message,) = CHAT.read(body).messages
        message["content"].encode()
