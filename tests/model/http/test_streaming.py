"""Answers that each kind of token server streams while it samples them, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ProtocolError, RequestContract, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.servers.sglang import GenerateEvents
from prorl_envs.model.servers.vllm_wire import CompletionEvents
from prorl_envs.model.types import Partial, Sampled, Sampling
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.scripted_servers import KINDS, scripted_server

pytestmark = pytest.mark.anyio

RENDERER = builtin_renderer()
CALL = {"tool": "bash", "arguments": {"command": "ls"}, "content": "First I look at what there is."}
BOOK = ScriptBook.from_tapes({"List the files.": [[CALL]]})
PROMPT = RENDERER.prompt([{"role": "user", "content": "List the files."}])
EXPECTED = RequestContract(PROMPT, 100, RENDERER.vocab_size, "here")


class Listened:
    """Record the length of each partial answer, and the last one."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.partial: Partial | None = None

    def __call__(self, partial: Partial) -> None:
        self.counts.append(len(partial.ids))
        self.partial = partial
        assert len(partial.ids) == len(partial.logprobs)


@asynccontextmanager
async def pool(url: str, **options: Any) -> AsyncIterator[ModelPool]:
    made = ModelPool(Servers.of(RENDERER, **options).connect)
    made.add(url)
    try:
        yield made
    finally:
        await made.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_streamed_answer_grows_and_equals_an_unstreamed_one(kind: str) -> None:
    heard = Listened()
    async with scripted_server(kind, BOOK, tokens_per_s=400.0) as server, pool(server.url) as model:
        told = await model.generate(PROMPT, Sampling(max_tokens=640), session="s", on_partial=heard)
        whole = await model.generate(PROMPT, Sampling(max_tokens=640), session="s")
    assert heard.partial is not None
    assert (tuple(heard.partial.ids), tuple(heard.partial.logprobs)) == (told.ids, told.logprobs)
    assert (told.ids, told.logprobs, told.finish_reason) == (whole.ids, whole.logprobs, whole.finish_reason)
    assert (told.weight_version, told.server) == (whole.weight_version, whole.server)
    assert heard.counts == sorted(heard.counts) and len(set(heard.counts)) > 2
    assert server.counts.violations == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_a_streamed_turn_stops_its_sampling(kind: str) -> None:
    heard = Listened()
    async with scripted_server(kind, BOOK, tokens_per_s=30.0) as server, pool(server.url) as model:
        call = asyncio.ensure_future(
            model.generate(PROMPT, Sampling(max_tokens=64), session="s", on_partial=heard)
        )
        while not (heard.partial and heard.partial.ids):  # noqa: ASYNC110 - it comes over HTTP
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.wait_for(server.until(lambda counts: counts.running == 0), 20)
        assert server.counts.sampled_tokens == 0 or server.counts.told_to_abort, "it did not go on to its end"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("behaviour", ["bad_ids", "short_logprobs", "disconnect"])
async def test_invalid_tokens_are_an_error_and_not_streamed(kind: str, behaviour: str) -> None:
    heard, limits = Listened(), ClientLimits(attempts=2, backoff_s=0)
    mix = behaviour
    async with (
        scripted_server(kind, BOOK, mix=mix) as server,
        pool(server.url, limits=limits) as model,
    ):
        with pytest.raises(ModelError):
            await model.generate(PROMPT, Sampling(max_tokens=64), session="s", on_partial=heard)
    assert heard.partial is not None
    assert all(0 <= number < RENDERER.vocab_size for number in heard.partial.ids)


async def test_a_stream_that_breaks_off_is_restarted() -> None:
    """The listener receives an empty partial answer first."""
    whole = b"".join(b"data: " + event + b"\n\n" for event in _completion(b"1", b"2", b"3"))
    answers = iter([whole[: len(whole) // 2], whole + b"data: [DONE]\n\n"])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = [(b"content-type", b"text/event-stream")]
        if path != "/v1/completions":
            status, body = (200, b'{"data": [{"id": "m"}]}') if path == "/v1/models" else (404, b"")
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        body = next(answers)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not body.endswith(b"]\n\n")})

    heard = Listened()
    limits = ClientLimits(attempts=2, backoff_s=0)
    async with answering(app, log_level="critical") as url, pool(f"vllm+{url}", limits=limits) as model:
        sampled = await model.generate([5, 6], Sampling(max_tokens=9), session="s", on_partial=heard)
    assert sampled.ids == (1, 2, 3)
    assert 0 in heard.counts[1:] and heard.counts[-1] == 3


def _completion(*ids: bytes) -> list[bytes]:
    choice = (
        b'{"choices": [{"token_ids": [%s], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": %s}]}'
    )
    return [choice % (number, b'"stop"' if number == ids[-1] else b"null") for number in ids]


def _generate(*ids: int, total: int, end: bool = False) -> bytes:
    pairs = ", ".join(f"[-0.5, {number}, null]" for number in ids)
    reason = '{"type": "stop"}' if end else "null"
    meta = f'"finish_reason": {reason}, "completion_tokens": {total}, "output_token_logprobs": [{pairs}]'
    return f'{{"output_ids": {list(ids)}, "meta_info": {{{meta}}}}}'.encode()


@pytest.mark.parametrize(
    ("make", "events", "says"),
    [
        (CompletionEvents, [b"{"], "did not answer with a completion"),
        (CompletionEvents, [b'{"choices": [{"token_ids": [1]}]}'], "no log-probabilities for 1 ids"),
        (CompletionEvents, [b'{"choices": []}'], "0 choices"),
        (CompletionEvents, _completion(b"-1"), "outside the vocabulary"),
        (CompletionEvents, _completion(*[b"1"] * 101), "returned 1 ids, 0 were requested"),
        (GenerateEvents, [b"{}"], "did not answer as SGLang does"),
        (GenerateEvents, [_generate(1, total=1), _generate(2, 3, total=2)], "left tokens out"),
        (GenerateEvents, [_generate(1, total=1), _generate(3, total=3)], "left tokens out"),
        (GenerateEvents, [_generate(1, total=1)], "unknown reason"),
        (GenerateEvents, [], "an empty stream"),
    ],
)
def test_invalid_events_are_an_error(make: Callable[..., Events], events: list[bytes], says: str) -> None:
    stream = make(lambda partial: None, EXPECTED)
    for event in events:
        assert stream.feed(b"data: " + event + b"\n\n")
    stream.feed(b"data: [DONE]\n\n")
    with pytest.raises(ProtocolError, match=says):
        stream.whole()


@pytest.mark.parametrize("make", [CompletionEvents, GenerateEvents])
def test_an_error_event_is_a_failed_server(make: Callable[..., Events]) -> None:
    """An error event has the effect of status 500: another server may succeed."""
    stream = make(lambda partial: None, EXPECTED)
    stream.feed(b'data: {"error": {"message": "out of memory", "code": 500}}\n\ndata: [DONE]\n\n')
    with pytest.raises(ServerUnavailable, match="out of memory"):
        stream.whole()


@pytest.mark.parametrize(
    ("make", "events"),
    [
        (CompletionEvents, _completion(b"1", b"2", b"3")),
        (
            GenerateEvents,
            [_generate(1, total=1), _generate(1, 2, total=2), _generate(1, 2, 3, total=3, end=True)],
        ),
        (GenerateEvents, [_generate(1, total=1), _generate(2, total=2), _generate(3, total=3, end=True)]),
        (GenerateEvents, [_generate(1, 2, 3, total=3), _generate(total=3, end=True)]),
    ],
)
def test_the_answer_does_not_depend_on_how_the_bytes_are_split(
    make: Callable[..., Events], events: list[bytes]
) -> None:
    data = b"".join(b"data: " + event + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    answers: set[Sampled] = set()
    for size in (1, 2, 7, 40, len(data)):
        stream = make(lambda partial: None, EXPECTED)
        for at in range(0, len(data), size):
            stream.feed(data[at : at + size])
        answers.add(stream.whole())
        stream.begin()
        stream.feed(data[: len(data) // 2])
        with pytest.raises(ProtocolError, match="broke its stream off"):
            stream.whole()
    (answer,) = answers
    assert answer.ids == (1, 2, 3) and answer.logprobs == (-0.5,) * 3
