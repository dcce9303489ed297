"""Streams from a real model server over HTTP: text is sent at once, and a disconnect stops sampling."""

import asyncio
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from prorl_envs.model.tool_formats.choice import FORMATS
from prorl_envs.model.types import AssistantTurn, Sampling
from prorl_envs.rollout.api.types import AgentLimits
from prorl_envs.rollout.endpoint.incremental_parse import IncrementalParser
from tests.rollout.endpoint.conftest import LS, Served, check_rows, scripted_endpoint
from tests.support.families import family_renderer
from tests.support.scripted_servers import KINDS

pytestmark = pytest.mark.anyio

WORDS = "First I look at what there is, then I write it down, and then I am done with all of it."
TAPE = [
    [{"tool": "ls", "arguments": {"command": "ls"}, "content": WORDS}],
    [{"tool": "ls", "arguments": {"command": "ls -l"}, "content": WORDS}],
]
MESSAGES: list[Any] = [{"role": "user", "content": "the task"}]
TOOLS: Any = [{"type": "function", "function": {"name": "ls", "parameters": LS}}]


def openai_client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0)


@pytest.mark.parametrize("kind", KINDS)
async def test_text_is_sent_before_the_answer_is_complete(kind: str) -> None:
    slow = {**KINDS[kind], "tokens_per_s": 40.0, "noncanonical": 0.3}
    sampling = Sampling(max_tokens=500)
    async with scripted_endpoint({"the task": TAPE}, server=slow, sampling=sampling) as (served, server):
        async with openai_client(served) as client:
            stream = await client.chat.completions.create(
                model="m", messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            text, early, calls = "", 0, []
            async for chunk in stream:
                delta = chunk.choices[0].delta if chunk.choices else None
                if delta is not None and delta.content:
                    early += server.counts.running
                    text += delta.content
                if delta is not None and delta.tool_calls:
                    calls += delta.tool_calls
        assert text == WORDS and len(calls) == 1
        assert early >= 3, "pieces came while the server was still sampling"
        check_rows(served.rows)
        assert served.rows[0].turns[0].end - served.rows[0].turns[0].start == server.counts.sampled_tokens


async def test_streams_and_unstreamed_answers_are_one_row() -> None:
    async with scripted_endpoint({"the task": TAPE}, server={"noncanonical": 0.3}) as (served, server):
        messages = list(MESSAGES)
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=served.key) as client:
            for turn in range(3):
                async with client.messages.stream(
                    model="m", max_tokens=900, messages=messages, tools=[{"name": "ls", "input_schema": LS}]
                ) as sent:
                    said = await sent.get_final_message()
                messages.append({"role": "assistant", "content": said.content})
                results: list[Any] = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": f"result {turn}"}
                    for block in said.content
                    if block.type == "tool_use"
                ]
                messages.append({"role": "user", "content": results})
        (row,) = served.rows
        check_rows([row])
        assert len(row.turns) == 3 and server.counts.violations == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_sampled_for_a_disconnected_client_are_kept_apart(stream: bool, kind: str) -> None:
    """The generation stops, its tokens are in no row to train on, and the conversation continues."""
    options = {**KINDS[kind], "tokens_per_s": 60.0, "noncanonical": 0.3}
    limits, sampling = AgentLimits(max_turns=2), Sampling(max_tokens=200)
    opening = scripted_endpoint({"the task": TAPE}, server=options, limits=limits, sampling=sampling)
    async with opening as (served, server):
        async with openai_client(served) as client:
            asking: Any = client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            task = asyncio.create_task(_read(asking) if stream else asking)
            await asyncio.wait_for(_sampled(served), 30)
            task.cancel()
            await asyncio.wait({task})
            await asyncio.wait_for(server.until(lambda counts: counts.running == 0), 30)
            while served.session.calls:  # noqa: ASYNC110 - it finishes by itself
                await asyncio.sleep(0.01)
            assert served.rows == []
            await client.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
            with pytest.raises(openai.PermissionDeniedError):
                await client.chat.completions.create(model="m", messages=MESSAGES)
        (kept,) = served.session.recording.unfinished_answers
        (turn,) = kept.turns
        (row,) = served.rows
        check_rows([row, kept])
        assert turn.finish_reason == "abort" and turn.end == len(kept.ids) > turn.start
        assert turn.weight_version == (
            "" if kind in ("vllm-scale-out", "llamacpp") else "scripted-0"
        )  # no version
        whole = row.ids[row.turns[0].start :]
        assert kept.ids[turn.start :] == whole[: turn.end - turn.start], "exactly what was sampled"


async def _sampled(served: Served) -> None:
    """Wait until tokens have been sampled."""
    while not any(live.partial and live.partial.ids for live in served.session._calls.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_the_end_of_a_rollout_keeps_its_sampled_tokens() -> None:
    async with scripted_endpoint({"the task": TAPE}, server={"tokens_per_s": 30.0}) as (served, _):
        async with openai_client(served) as client:
            task = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            await asyncio.wait_for(_sampled(served), 30)
            await served.session.aclose()
            await asyncio.gather(task, return_exceptions=True)
        assert served.rows == [] and len(served.session.recording.unfinished_answers) == 1


async def _read(asking: Any) -> None:
    async for _ in await asking:
        pass


async def test_a_server_lost_within_a_stream_is_an_error_of_the_stream() -> None:
    server = {"tokens_per_s": 60.0}
    async with scripted_endpoint({"the task": TAPE}, server=server) as (served, played):
        async with openai_client(served) as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError):
                async for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        live = next(iter(served.session._calls))
                        live.cancel()
        assert served.rows == [] and played.counts.requests == 1


@pytest.mark.parametrize(
    "family", ["hermes", "coder", "llama", "harmony", "gemma", "kimi", "minimax", "pythonic"]
)
def test_streamed_text_is_a_prefix_of_the_answer(family: str) -> None:
    """For any split of the ids, no part of a call is streamed as text, and streamed text is never revised."""
    renderer = family_renderer(family)
    arguments = {"command": "a < b && c [d] {e}"}
    message = {
        "role": "assistant",
        "content": "" if family in ("llama", "harmony", "pythonic") else "I <b>look</b> at [it]: {x}.",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "ls", "arguments": arguments}}],
    }
    ids = renderer.assistant(message)
    whole = renderer.parse(ids)
    parser = IncrementalParser(renderer, (), ())
    sent = ""
    for end in range(1, len(ids)):
        sent += parser.new_text(ids[:end])[1]
        assert whole.content.startswith(sent), (end, sent)
    sent += parser.remaining(whole)[1]
    assert sent == whole.content


def test_an_answer_after_reasoning_without_a_start_is_sent() -> None:
    """The text streamed before its end cannot be taken back, but the answer after it is complete."""

    def parse(ids: str, *_: Any, **__: Any) -> AssistantTurn:
        turn = FORMATS["hermes"].turn(ids)
        return AssistantTurn(turn.content, (), turn.malformed, turn.reasoning)

    letters: Any = SimpleNamespace(tool_format="hermes", parse=parse)
    parser = IncrementalParser(letters, (), ())
    whole: Any = "I look at it.</think>\n\nIt is done."
    sent = ["", ""]
    for end in range(1, len(whole)):
        for kind, text in enumerate(parser.new_text(whole[:end])):
            sent[kind] += text
    sent[1] += parser.remaining(parse(whole))[1]
    assert sent[1].endswith("It is done.") and "I look at it." in "".join(sent)
