"""Servers of every kind that send invalid answers: refused with a typed error, over real HTTP."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ProtocolError, RequestContract, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers import chat, sglang
from prorl_envs.model.servers.chat import OpenAIChatClient
from prorl_envs.model.servers.llamacpp import LlamaCppClient
from prorl_envs.model.servers.sglang import SglangClient
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import Conversation, Sampled, Sampling
from prorl_envs.rollout.http.server import answering
from prorl_envs.strict_json import call_arguments

pytestmark = pytest.mark.anyio

LIMITS = ClientLimits(attempts=1, max_body_bytes=1 << 20)
SAMPLING = Sampling(max_tokens=3)
CONVERSATION = Conversation([{"role": "user", "content": "Hello."}], ())

type Ask = Callable[[str], Awaitable[Sampled]]


async def ask_vllm(url: str) -> Sampled:
    client = VllmClient(url, stop_ids=(), vocab_size=10, model="m", limits=LIMITS)
    try:
        return await client.generate([1, 2], SAMPLING, session="s")
    finally:
        await client.aclose()


async def ask_sglang(url: str) -> Sampled:
    client = SglangClient(url, stop_ids=(), vocab_size=10, limits=LIMITS)
    try:
        return await client.generate([1, 2], SAMPLING, session="s")
    finally:
        await client.aclose()


async def ask_llamacpp(url: str) -> Sampled:
    client = LlamaCppClient(url, stop_ids=(), vocab_size=10, limits=LIMITS)
    try:
        return await client.generate([1, 2], SAMPLING, session="s")
    finally:
        await client.aclose()


async def ask_chat(url: str) -> Sampled:
    client = OpenAIChatClient(url, encode=lambda _: [4, 5], model="m", limits=LIMITS)
    try:
        return await client.chat(CONVERSATION, SAMPLING, session="s")
    finally:
        await client.aclose()


ASKS = [ask_vllm, ask_sglang, ask_llamacpp, ask_chat]


@asynccontextmanager
async def answers(body: bytes, *, length: int | None = None, repeat: int = 1) -> AsyncIterator[str]:
    """Serve the same bytes for every request."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(repeat):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        if length is None:
            await send({"type": "http.response.body", "body": b""})

    async with answering(app, last_requests_s=1, log_level="critical") as url:
        yield url


def native(**changes: Any) -> dict[str, Any]:
    """Return an answer in SGLang's format, with changes to its `meta_info` or `output_ids`."""
    meta = {
        "finish_reason": {"type": "stop", "matched": 5},
        "output_token_logprobs": [[-0.5, 4, None], [-1.5, 5, None]],
        "weight_version": "3",
        "prompt_tokens": 2,
    }
    ids = changes.pop("output_ids", [4, 5])
    return {"text": "ab", "output_ids": ids, "meta_info": {**meta, **changes}}


WRONG: list[dict[str, Any]] = [
    {"output_ids": [4]},
    {"output_ids": [4, 6]},
    {"output_ids": [4, 5, 6, 7], "output_token_logprobs": [[-1, 4], [-1, 5], [-1, 6], [-1, 7]]},
    {"output_ids": [-1, 5], "output_token_logprobs": [[-1, -1], [-1, 5]]},
    {"output_ids": [10, 5], "output_token_logprobs": [[-1, 10], [-1, 5]]},
    {"output_ids": [4.5, 5]},
    {"output_ids": "45"},
    {"output_ids": [True, 5]},
    {"output_ids": []},
    {"output_token_logprobs": None},
    {"output_token_logprobs": []},
    {"output_token_logprobs": [[-0.5, 4], [-1.5]]},
    {"output_token_logprobs": [[-0.5, 4], [None, 5]]},
    {"output_token_logprobs": [[-0.5, 4], ["-1.5", 5]]},
    {"output_token_logprobs": [[-0.5, 4], [0.5, 5]]},
    {"output_token_logprobs": [[-0.5, 4], [-1e999, 5]]},
    {"output_token_logprobs": [[-0.5, 4], [-1.5, True]]},
    {"output_token_logprobs": [-0.5, -1.5]},
    {"finish_reason": None},
    {"finish_reason": "stop"},
    {"finish_reason": {"type": "bored"}},
    {"prompt_tokens": 1},
    {"weight_versions": [{"version": "1", "start": 0, "end": 1}]},
    {"weight_versions": [{"version": "1", "start": 1, "end": 2}]},
    {"weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 2}]},
    {"weight_versions": [{"version": "1", "start": 0, "end": 3}]},
    {"weight_versions": [{"version": None, "start": 0, "end": 2}]},
]


async def test_a_valid_answer_of_sglang_is_accepted() -> None:
    async with answers(json.dumps(native()).encode()) as url:
        sampled = await ask_sglang(url)
    assert (sampled.ids, sampled.logprobs, sampled.weight_version) == ((4, 5), (-0.5, -1.5), "3")


@pytest.mark.parametrize("changes", WRONG, ids=str)
async def test_an_invalid_answer_of_sglang_is_refused(changes: dict[str, Any]) -> None:
    body = json.dumps(native(**dict(changes))).replace("-Infinity", "-1e999").encode()
    async with answers(body) as url:
        with pytest.raises(ProtocolError):
            await ask_sglang(url)


NO_JSON = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"choices": [{',
    b"\xff\xfe",
    b"NaN",
    b"[" * 100_000,
    b"<html></html>",
]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("body", NO_JSON, ids=lambda body: repr(body[:12]))
async def test_bytes_that_are_not_an_answer_are_refused(ask: Ask, body: bytes) -> None:
    async with answers(body) as url:
        with pytest.raises(ProtocolError):
            await ask(url)


@pytest.mark.parametrize("ask", ASKS)
async def test_an_endless_answer_is_cut_off(ask: Ask) -> None:
    async with answers(b" " * 65_536, repeat=1000) as url:
        with pytest.raises(ProtocolError, match="more than 1048576 bytes"):
            await ask(url)


@pytest.mark.parametrize("ask", ASKS)
async def test_an_incomplete_answer_is_refused(ask: Ask) -> None:
    async with answers(json.dumps(native()).encode(), length=100_000) as url:
        with pytest.raises(ServerUnavailable, match="broke the connection"):
            await ask(url)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["meta_info", "output_ids", "finish_reason", "type", "choices",
                                         "message", "tool_calls", "function", "name", "arguments",
                                         "output_token_logprobs", "content", "weight_versions"]),
                        inner, max_size=4)))  # fmt: skip
def test_parsing_raises_only_model_errors(value: object) -> None:
    body = json.dumps(value).encode()
    expected = RequestContract([1, 2], max_tokens=3, vocab_size=10, server="http://s")
    for read in (lambda: sglang.read_answer(body, expected), lambda: chat.read_answer(body, "http://s")):
        try:
            read()
        except ModelError:
            continue


async def test_a_chat_answer_is_marked_as_inexact() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with answers(
        json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    ) as url:
        sampled = await ask_chat(url)
    assert not sampled.exact
    assert (sampled.ids, sampled.logprobs) == ((4, 5), (0.0, 0.0))


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"command": "ls"}', {"command": "ls"}),
        ({"command": "ls"}, {"command": "ls"}),
        (json.dumps(json.dumps({"command": "ls"})), {"command": "ls"}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
    ],
)
def test_arguments_of_calls_have_several_encodings(written: Any, arguments: dict[str, Any]) -> None:
    message = {"content": None, "tool_calls": [{"function": {"name": "bash", "arguments": written}}]}
    read, _ = chat.read_answer(json.dumps({"choices": [{"message": message}]}).encode(), "http://s")
    assert [call["function"]["arguments"] for call in read["tool_calls"]] == [arguments]


@pytest.mark.parametrize("written", ['"ls"', "[]", "3", '"[1]"', json.dumps(json.dumps(json.dumps({})))])
def test_other_arguments_are_none(written: str) -> None:
    assert call_arguments(written) is None


def test_a_call_with_broken_arguments_stays_visible() -> None:
    function = {"name": "bash", "arguments": '{"command": '}
    message = {"content": "Well.", "tool_calls": [{"function": function}]}
    read, _ = chat.read_answer(json.dumps({"choices": [{"message": message}]}).encode(), "http://s")
    assert "tool_calls" not in read
    assert '{"command": ' in read["content"] and "<tool_call>" in read["content"]
