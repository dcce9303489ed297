"""The llama.cpp client with the scripted server's llama.cpp face over real HTTP, and with invalid answers."""

import asyncio
import json
import math
from functools import partial
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from prorl_envs.model.answer_checks import ProtocolError, RequestContract
from prorl_envs.model.servers.llamacpp import LlamaCppClient, LlamaCppEvents, encode_request, read_answer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.http.server import answering
from tests.model.listing import BOOK, PROMPT, RENDERER
from tests.model.listing import talking_to as talking
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer

pytestmark = pytest.mark.anyio

EXPECTED = RequestContract([1, 2], 3, 10, "http://llama")
LOST = b"The model produced output that does not match the expected Content-only format"


def server(**options: Any) -> TimedServer:
    return scripted_server("llamacpp", BOOK, **options)


talking_to = partial(talking, LlamaCppClient)


async def test_ids_are_sent_and_returned_with_logprobs() -> None:
    async with server() as llama, talking_to(llama.url) as client:
        answer = await client.generate(PROMPT, Sampling(), session="s")
        assert [call.arguments for call in RENDERER.parse(answer.ids).tool_calls] == [{"command": "ls"}]
        assert len(answer.logprobs) == len(answer.ids) and max(answer.logprobs) <= 0
        assert (answer.finish_reason, answer.weight_version, answer.cached_tokens) == ("stop", "", 0)
        assert answer.ids[-1] in RENDERER.stop_ids
        again = await client.generate([*PROMPT, *answer.ids], Sampling(), session="s")
        assert again.cached_tokens == len(PROMPT) + len(answer.ids)
        short = await client.generate(PROMPT, Sampling(max_tokens=5), session="t")
        assert (len(short.ids), short.finish_reason) == (5, "length")
        assert llama.counts.violations == 0
        assert (await client.look()).model == "scripted"
        assert not await client.pause("abort") and not await client.resume("2")


async def test_disconnecting_stops_the_sampling() -> None:
    async with server(latency_s=3600.0) as llama, talking_to(llama.url) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(), session="s"))
        await llama.until(lambda counts: counts.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llama.until(lambda counts: counts.aborted == 1 and counts.running == 0)


async def test_an_answer_that_the_server_lost_is_not_sampled_again() -> None:
    """Repeated sampling until the text is UTF-8 would change the policy."""
    asked = 0

    async def loses(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal asked
        asked += 1
        error = {"error": {"code": 500, "message": LOST.decode(), "type": "server_error"}}
        await JSONResponse(error, status_code=500)(scope, receive, send)

    async with answering(loses) as url, talking_to(url) as client:
        with pytest.raises(ProtocolError, match="lost what it had sampled"):
            await client.generate(PROMPT, Sampling(), session="s")
    assert asked == 1


def test_a_request_has_only_the_samplers_of_the_policy() -> None:
    asked = json.loads(encode_request([1, 2], Sampling(temperature=0.5, top_p=0.9, max_tokens=7)))
    assert asked["prompt"] == [1, 2] and asked["n_predict"] == 7
    assert asked["samplers"] == ["temperature", "top_p"] and asked["post_sampling_probs"]
    assert (asked["temperature"], asked["top_p"], asked["seed"]) == (0.5, 0.9, -1)
    assert 0 <= json.loads(encode_request([1], Sampling(seed=2**62)))["seed"] < 2**32 - 1


def native(**changes: Any) -> bytes:
    """Return an answer in llama.cpp's format, with changes."""
    answer = {
        "tokens": [4, 5, 6],
        "stop_type": "limit",
        "truncated": False,
        "tokens_evaluated": 2,
        "completion_probabilities": [{"id": number, "prob": 0.5} for number in (4, 5, 6)],
        "timings": {"cache_n": 1},
    }
    return json.dumps(answer | changes).encode()


def event(number: int, **changes: Any) -> bytes:
    """Return one id in llama.cpp's format."""
    told = {"tokens": [number], "stop": False, "completion_probabilities": [{"id": number, "prob": 0.5}]}
    return b"data: " + json.dumps(told | changes).encode() + b"\n\n"


def last(**changes: Any) -> bytes:
    """Return the event after the last id."""
    ended = {"tokens": [], "stop_type": "limit", "tokens_predicted": 3, "timings": {"cache_n": 1}}
    return b"data: " + json.dumps(ended | changes).encode() + b"\n\n"


def listen(*events: bytes, stops: tuple[int, ...] = ()) -> Sampled:
    heard: list[int] = []
    listener = LlamaCppEvents(lambda partial: heard.append(len(partial.ids)), EXPECTED, frozenset(stops))
    listener.feed(b"".join(events))
    answer = listener.whole()
    assert heard[-1] == len(answer.ids)
    return answer


def test_a_stream_ends_with_the_details_of_the_answer() -> None:
    three = [event(number) for number in (4, 5, 6)]
    whole = listen(*three, last())
    assert (whole, whole.cached_tokens) == (read(native()), 1)
    stopped = listen(*three, last(), stops=(5,))
    assert (stopped.ids, len(stopped.logprobs), stopped.finish_reason) == ((4, 5), 2, "stop")
    long = listen(*three, event(7), last(stop_type="eos", tokens_predicted=4))
    assert (long.ids, long.finish_reason) == ((4, 5, 6), "length")


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event(4), event(6), last()], "left ids out"),
        ([event(4), event(5), event(6)], "broke its stream off"),
        ([event(4, completion_probabilities=[{"id": 5, "prob": 0.5}])], "other ids"),
        ([event(4, completion_probabilities=None)], "0 log-probabilities"),
        ([event(99)], "outside the vocabulary"),
        ([event(4), event(5), event(6), last(truncated=True)], "dropped a part"),
        ([event(4), event(5), event(6), last(tokens_evaluated=7)], "read 7 prompt ids"),
        ([event(4, tokens="x")], "did not answer as llama.cpp"),
        ([event(4), b'data: {"error":{"message":"' + LOST + b'"}}\n\n'], "lost what it had sampled"),
    ],
)
def test_impossible_streams_are_refused(events: list[bytes], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        listen(*events)


def read(body: bytes, *stops: int) -> Sampled:
    return read_answer(body, EXPECTED, frozenset(stops))


def test_tokens_after_a_stop_id_or_the_limit_are_cut_off() -> None:
    whole = read(native())
    assert (whole.ids, whole.finish_reason, whole.cached_tokens) == ((4, 5, 6), "length", 1)
    assert whole.logprobs == pytest.approx([math.log(0.5)] * 3)
    stopped = read(native(), 5)
    assert (stopped.ids, len(stopped.logprobs), stopped.finish_reason) == ((4, 5), 2, "stop")
    more = [{"id": number, "prob": 0.5} for number in (4, 5, 6, 7)]
    long = read(native(tokens=[4, 5, 6, 7], stop_type="eos", completion_probabilities=more))
    assert (long.ids, long.finish_reason) == ((4, 5, 6), "length")
    full = read(native(tokens=[4], truncated=True, completion_probabilities=[{"id": 4, "prob": 1.0}]))
    assert (full.ids, full.finish_reason) == ((4,), "length"), "its context is full"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": None}, "did not answer as llama.cpp"),
        ({"tokens": [4, 5, 99]}, "other ids"),
        ({"tokens": [], "completion_probabilities": []}, "no ids"),
        ({"completion_probabilities": None}, "no log-probabilities|0 log-probabilities"),
        ({"completion_probabilities": [{"id": 4}, {"id": 5}, {"id": 6}]}, "impossible"),
        ({"completion_probabilities": [{"id": n, "prob": 0.0} for n in (4, 5, 6)]}, "impossible"),
        ({"completion_probabilities": [{"id": n, "prob": 7.0} for n in (4, 5, 6)]}, "impossible"),
        ({"tokens_evaluated": 3}, "read 3 prompt ids"),
        ({"truncated": True}, "dropped a part"),
        ({"truncated": True, "stop_type": "eos"}, "dropped a part"),
        ({"stop_type": "word"}, "unknown reason"),
        ({"stop_type": 3}, "did not answer as llama.cpp"),
    ],
)
def test_impossible_answers_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read(native(**changes))
    with pytest.raises(ProtocolError):
        read(b"\xff[")
