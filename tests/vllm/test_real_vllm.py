"""The model client, the pool and complete rollouts with a real vLLM."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_envs.model.answer_checks import ProtocolError, RequestContract
from prorl_envs.model.http.client import ModelHttpClient
from prorl_envs.model.servers.compatibility_checks import CheckState, CheckSubject, check_server
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.servers.vllm_wire import CompletionEvents, encode_request, read_answer
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import Result
from tests.support.drift import TOOL
from tests.vllm.conftest import VERSIONS, RealServer

pytestmark = [pytest.mark.vllm, pytest.mark.anyio, pytest.mark.timeout(1200)]

GREEDY = Sampling(temperature=0.0, max_tokens=60)
#: For a client without stop ids: long enough to act meanwhile.
LONG = Sampling(temperature=1.0, max_tokens=1200, seed=3)


@pytest.fixture
def renderer(models: Path) -> TemplateRenderer:
    return load_renderer(models / VERSIONS[0])


@pytest.fixture
def prompt(renderer: TemplateRenderer) -> list[int]:
    return renderer.prompt([{"role": "user", "content": "the agent reads a task"}], [TOOL])


@asynccontextmanager
async def talking(
    server: RealServer, renderer: TemplateRenderer, *, endless: bool = False
) -> AsyncIterator[VllmClient]:
    stops = () if endless else renderer.stop_ids
    client = VllmClient(server.url, stop_ids=stops, vocab_size=renderer.vocab_size)
    try:
        yield client
    finally:
        await client.aclose()


async def until(holds: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(holds):  # noqa: ASYNC110  (it happens in another process)
        await asyncio.sleep(0.05)


async def test_both_routes_accept_ids_and_return_the_same_ids(
    server: RealServer, renderer: TemplateRenderer, prompt: list[int]
) -> None:
    async with talking(server, renderer) as client:
        answer = await client.generate(prompt, GREEDY, session="s")
    link = ModelHttpClient(server.url)
    try:
        body = encode_request("tiny", prompt, GREEDY, renderer.stop_ids)
        raw = await link.request("POST", "/v1/completions", body)
    finally:
        await link.aclose()
    expected = RequestContract(prompt, GREEDY.max_tokens, renderer.vocab_size, server.url)
    other = read_answer(raw, expected)
    assert answer.ids == other.ids
    assert answer.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert (answer.finish_reason, answer.ids[-1]) == ("stop", renderer.stop_ids[0])
    assert answer.weight_version, "only this route names versions"
    (call,) = renderer.parse(answer.ids, [TOOL]).tool_calls
    assert (call.name, call.arguments) == ("bash", {"command": f"echo {VERSIONS[0]}"})
    with pytest.raises(ProtocolError):
        read_answer(raw, RequestContract(prompt[1:], GREEDY.max_tokens, renderer.vocab_size, server.url))


async def test_both_routes_stream_an_answer_while_it_is_sampled(
    server: RealServer, renderer: TemplateRenderer, prompt: list[int]
) -> None:
    told: list[list[int]] = [[], []]
    expected = RequestContract(prompt, GREEDY.max_tokens, renderer.vocab_size, server.url)
    async with talking(server, renderer) as client:
        whole = await client.generate(prompt, GREEDY, session="s")
        streamed = await client.stream(
            prompt, GREEDY, session="s", on_partial=lambda partial: told[0].append(len(partial.ids))
        )
    events = CompletionEvents(lambda partial: told[1].append(len(partial.ids)), expected)
    link = ModelHttpClient(server.url)
    try:
        body = encode_request("tiny", prompt, GREEDY, renderer.stop_ids, stream=True)
        await link.request("POST", "/v1/completions", body, listener=events)
    finally:
        await link.aclose()
    other = events.whole()
    assert streamed.ids == whole.ids == other.ids
    assert (streamed.weight_version, streamed.finish_reason) == (whole.weight_version, other.finish_reason)
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
    assert other.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
    assert all(len(set(counts)) > 3 and counts == sorted(counts) for counts in told)


async def test_vllm_passes_check_llm(
    server: RealServer, renderer: TemplateRenderer, prompt: list[int]
) -> None:
    servers = Servers.of(renderer)
    client = servers.connect(server.url)
    try:
        findings = await check_server(CheckSubject(client, servers, server.url, prompt), pauses=True)
    finally:
        await client.aclose()
    assert {finding.id: (finding.state, finding.reason) for finding in findings if finding.reason} == {}
    assert all(finding.state is CheckState.KEPT for finding in findings)


async def test_a_disconnected_request_stops_on_the_server(
    server: RealServer, renderer: TemplateRenderer, prompt: list[int]
) -> None:
    def running() -> float:
        return server.metric("vllm:num_requests_running")

    async with talking(server, renderer, endless=True) as client:
        call = asyncio.create_task(client.generate(prompt, LONG, session="s"))
        await until(lambda: running() > 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: running() == 0)


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_two_weight_versions_in_one_turn_are_spans(
    server: RealServer, renderer: TemplateRenderer, prompt: list[int], mode: str
) -> None:
    """Update the weights during a turn, like the pool."""
    from prorl_envs.model.routing.pool import ModelPool

    pool = ModelPool(Servers(vocab_size=renderer.vocab_size).connect)
    pool.add(server.url)
    try:
        await asyncio.to_thread(server.load, server.models / VERSIONS[0])
        await pool.pause("finish")
        await pool.resume("v1")
        seen = server.metric("vllm:generation_tokens_total")
        turn = asyncio.create_task(pool.generate(prompt, LONG, session=mode))
        await until(lambda: server.metric("vllm:num_requests_running") > 0)
        await until(lambda: server.metric("vllm:generation_tokens_total") > seen + 5)
        await pool.pause(mode)  # type: ignore[arg-type]
        await asyncio.to_thread(server.load, server.models / VERSIONS[1])
        await pool.resume("v2")
        answer = await turn
        async with talking(server, renderer) as client:
            after = await client.generate(prompt, GREEDY, session=mode)
    finally:
        await pool.aclose()
        await asyncio.to_thread(server.load, server.models / VERSIONS[0])
    assert [span.version for span in answer.version_spans] == ["v1", "v2"]
    first, second = answer.version_spans
    assert (first.start, first.end, second.end) == (0, second.start, len(answer.ids))
    assert answer.weight_version == "v1", "the oldest counts"
    assert len(answer.ids) == LONG.max_tokens, "nothing sampled is lost"
    (call,) = renderer.parse(after.ids, [TOOL]).tool_calls
    assert call.arguments == {"command": f"echo {VERSIONS[1]}"}, "the new weights speak"


def test_a_complete_rollout(server: RealServer, tmp_path: Path) -> None:
    """A user's command runs the bash family in sandboxes; a real server samples."""
    command = [Path(sys.executable).with_name("prorl-envs"), "run", "bash", "--llm", server.url]
    command += ["--tokenizer", server.models / VERSIONS[0], "--limit", "1", "--samples", "4"]
    command += ["--max-turns", "4", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = next(tmp_path.rglob("results.jsonl")).read_text().splitlines()
    results = [Result.model_validate(json.loads(line)) for line in lines]
    assert len(results) == 4
    for result in results:
        assert result.failure is None
        trajectory = result.trajectory
        assert trajectory is not None
        assert (trajectory.drift, trajectory.token_exact) == (0, True)
        assert sum(trajectory.loss_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
        assert all(
            value < 0 for value, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask
        )
        assert all(turn.weight_version for turn in trajectory.turns)
