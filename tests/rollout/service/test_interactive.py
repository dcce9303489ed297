"""Interactive episodes, driven by tokens, by tool calls or by the service's own loop, and their ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.api.errors import Conflict, NotFound, OutOfOrder, QueueFull, Unavailable
from prorl_envs.rollout.api.interactive import (
    AgentStep,
    CallRequest,
    CallStep,
    EpisodeRequest,
    EpisodeState,
    EpisodeView,
    TokenStep,
)
from prorl_envs.rollout.api.types import Stage, StopReason
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.http.app import create_app
from prorl_envs.testing.scripted import as_message
from tests.support.clock import FakeClock
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

SAY = CallStep(tool_calls=[CallRequest(name="say", arguments={"text": "hello"})])
FINISH = CallStep(tool_calls=[CallRequest(name="finish")])


@asynccontextmanager
async def talking(bench: Any, **options: Any) -> AsyncIterator[RolloutClient]:
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings()))
    async with RolloutClient("http://127.0.0.1", transport=transport, **options) as client:
        yield client


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[RolloutClient]:
    async with talking(bench, attempts=1) as client:
        yield client


def request(name: str = "e", **fields: Any) -> EpisodeRequest:
    task = {"id": name, "instruction": f"Do {name}.", "faults": fields.pop("faults", {})}
    return EpisodeRequest(id=name, environment="toy", task=task, **fields)


def tokens(renderer: TemplateRenderer, *calls: dict[str, Any], **fields: Any) -> TokenStep:
    ids = renderer.assistant(as_message(list(calls)))
    return TokenStep(ids=list(ids), logprobs=[-0.5] * len(ids), weight_version="9", **fields)


async def test_the_context_of_an_episode_driven_by_tokens_is_exact(
    bench: Any, client: RolloutClient, renderer: TemplateRenderer
) -> None:
    begun = await client.start_episode(request())
    assert begun.state is EpisodeState.READY
    assert begun.prompt is not None
    context = list(begun.prompt.ids)
    assert [tool["function"]["name"] for tool in begun.prompt.tools] == ["say", "finish"]
    mask = [0] * len(context)
    for text in ("one", "two"):
        step = tokens(renderer, {"tool": "say", "arguments": {"text": text}})
        last = (await client.run_episode("e", step)).last
        assert last is not None and last.ids is not None
        assert [message["role"] for message in last.messages] == ["assistant", "tool"]
        assert last.messages[1]["content"] == text
        assert text in renderer.decode(last.ids)
        context += [*step.ids, *last.ids]
        mask += [1] * len(step.ids) + [0] * len(last.ids)
    ending = tokens(renderer, {"tool": "finish", "arguments": {}})
    done = await client.run_episode("e", ending)
    assert done.last is not None
    assert (done.state, done.last.stop_reason, done.last.ids) == ("stopped", StopReason.FINISHED, [])
    graded = await client.evaluate_episode("e")
    assert graded.result is not None and graded.result.trajectory is not None
    assert (graded.result.reward, graded.result.mask_sample) == (1.0, False)
    assert graded.result.evidence == {"task": "e"}
    trajectory = graded.result.trajectory
    assert trajectory.ids == [*context, *ending.ids]
    assert trajectory.loss_mask == mask + [1] * len(ending.ids)
    assert trajectory.drift == 0
    assert [turn.weight_version for turn in trajectory.turns] == ["9"] * 3
    await bench.idle()
    assert (await client.evaluate_episode("e")).result == graded.result, "asking again gives the same"
    await client.close_episode("e")
    with pytest.raises(NotFound):
        await client.episode("e")


async def test_an_episode_driven_by_tool_calls_has_no_tokens(client: RolloutClient) -> None:
    await client.start_episode(request())
    view = await client.run_episode("e", SAY)
    assert view.last is not None
    assert view.last.ids is None
    assert view.last.messages[-1]["content"] == "hello"
    assert view.last.messages[0]["tool_calls"][0]["id"] == view.last.messages[1]["tool_call_id"]
    assert (await client.run_episode("e", FINISH)).state is EpisodeState.STOPPED
    result = (await client.evaluate_episode("e")).result
    assert result is not None
    assert (result.reward, result.mask_sample) == (1.0, True), "no tokens, so nothing to train on"
    assert [message["role"] for message in result.messages] == ["user", "assistant", "tool", "assistant"]


async def test_the_services_own_loop_continues_the_callers_episode(
    client: RolloutClient, renderer: TemplateRenderer
) -> None:
    await client.start_episode(request())
    step = tokens(renderer, {"tool": "say", "arguments": {"text": "mine"}})
    await client.run_episode("e", step)
    view = await client.run_episode("e", AgentStep(agent=True))
    assert view.last is not None
    assert view.last.stop_reason is StopReason.FINISHED
    result = (await client.evaluate_episode("e")).result
    assert result is not None and result.trajectory is not None
    assert [turn.weight_version for turn in result.trajectory.turns] == ["9", "7"]
    assert result.trajectory.drift == 0


async def test_malformed_answers_and_limits_are_handled_as_in_the_loop(
    client: RolloutClient, renderer: TemplateRenderer
) -> None:
    await client.start_episode(request("m", limits={"max_malformed": 2, "max_tokens": 2000}))
    broken = TokenStep(
        ids=list(renderer.assistant({"role": "assistant", "content": "<tool_call>{</tool_call>"}))
    )
    assert (await client.run_episode("m", broken)).state is EpisodeState.READY
    view = await client.run_episode("m", broken)
    assert view.last is not None
    assert view.last.stop_reason is StopReason.MALFORMED
    await client.start_episode(request("t", limits={"max_turns": 1}))
    said = await client.run_episode("t", tokens(renderer, {"tool": "say", "arguments": {"text": "x"}}))
    assert said.last is not None
    assert said.last.stop_reason is StopReason.TURN_LIMIT, "told before the caller samples in vain"
    await client.start_episode(request("long", limits={"max_tokens": 2000}))
    with pytest.raises(InputError, match="room"):
        await client.run_episode("long", TokenStep(ids=[1] * 2001))
    assert (await client.episode("long")).state is EpisodeState.READY


async def test_a_repeated_step_is_not_executed_again(bench: Any, client: RolloutClient) -> None:
    await client.start_episode(request())
    first = await client.run_episode("e", SAY.model_copy(update={"step": 0}))
    again = await client.run_episode("e", SAY.model_copy(update={"step": 0}))
    assert again == first
    assert bench.world.log.count(("e", "call")) == 1
    assert (await client.start_episode(request())).steps == 1, "and so is a beginning"


async def test_requests_out_of_order_are_refused(bench: Any, client: RolloutClient, renderer: Any) -> None:
    bench.world.gates["init"] = asyncio.Event()
    async with talking(bench) as other:
        starting = asyncio.create_task(other.start_episode(request()))
        await bench.world.until(lambda: bench.world.inside["init"] == 1)
        for early in (client.run_episode("e", SAY), client.evaluate_episode("e")):
            with pytest.raises(OutOfOrder, match="init"):
                await early
        bench.world.gates["init"].set()
        await starting
    with pytest.raises(Conflict):
        await client.start_episode(request(limits={"max_turns": 3}))
    for wrong in (3, 1):
        with pytest.raises(OutOfOrder, match="next step is 0"):
            await client.run_episode("e", SAY.model_copy(update={"step": wrong}))
    await client.run_episode("e", SAY)
    for mixed in (AgentStep(agent=True), tokens(renderer)):
        with pytest.raises(OutOfOrder, match="tokens or by tool calls"):
            await client.run_episode("e", mixed)
    await client.run_episode("e", FINISH)
    with pytest.raises(OutOfOrder, match="stopped"):
        await client.run_episode("e", SAY)
    await client.evaluate_episode("e")
    with pytest.raises(OutOfOrder, match="graded"):
        await client.run_episode("e", SAY)
    with pytest.raises(NotFound):
        await client.run_episode("none", SAY)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"init": "environment"}, FailureKind.ENVIRONMENT),
        ({"call": "sandbox"}, FailureKind.SANDBOX),
        ({"call": "crash"}, FailureKind.INTERNAL),
        ({"eval": "grader"}, FailureKind.GRADER),
        ({"eval": "nan"}, FailureKind.GRADER),
    ],
)
async def test_a_failure_is_typed_and_closes_the_sandbox(
    bench: Any, client: RolloutClient, faults: dict[str, str], kind: FailureKind
) -> None:
    view = await client.start_episode(request(faults=faults))
    if "call" in faults:
        view = await client.run_episode("e", SAY)
    if "eval" in faults:
        view = await client.evaluate_episode("e")
    assert (view.state, view.failure and view.failure.kind) == (EpisodeState.FAILED, kind)
    assert view.result is not None
    assert (view.result.reward, view.result.mask_sample) == (None, True)
    await bench.idle()
    with pytest.raises(OutOfOrder, match="failed"):
        await client.evaluate_episode("e")
    assert bench.service.status().internal_errors == (kind is FailureKind.INTERNAL)


@pytest.mark.parametrize("step", ["init", "call", "eval"])
async def test_ending_a_busy_episode_closes_its_sandbox(bench: Any, client: RolloutClient, step: str) -> None:
    bench.world.gates[step] = asyncio.Event()

    async def drive() -> EpisodeView:
        await client.start_episode(request())
        await client.run_episode("e", SAY)
        return await client.evaluate_episode("e")

    driving = asyncio.create_task(drive())
    await bench.world.until(lambda: bench.world.inside[step] == 1)
    await client.close_episode("e")
    assert bench.world.open == 0
    with pytest.raises(NotFound):
        await driving
    status = bench.service.status()
    assert (status.jobs_with_sandbox, status.episodes, status.pools["init"].active) == (0, 0, 0)


async def test_an_abandoned_episode_is_closed(make_bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, episode_idle_s=100)
    async with talking(bench, attempts=1, clock=clock) as client:
        await client.start_episode(request("short", idle_s=10))
        await client.start_episode(request("long", idle_s=1000))
        await clock.wait_for_sleepers(2)
        clock.advance(9)
        await client.episode("short")
        clock.advance(9)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await client.episode("short")).state is EpisodeState.READY, "asking keeps it"
        clock.advance(10)
        await bench.world.until(lambda: bench.world.open == 1)
        with pytest.raises(NotFound, match="short"):
            await client.episode("short")
        await clock.wait_for_sleepers(1)
        clock.advance(72)
        await bench.idle()
        assert [record.message for record in caplog.records if "no request for" in record.message]


async def test_a_working_episode_is_not_idle(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, episode_idle_s=10)
    async with talking(bench, clock=clock) as client:
        await client.start_episode(request())
        bench.world.gates["call"] = asyncio.Event()
        running = asyncio.create_task(client.run_episode("e", SAY))
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        clock.advance(50)
        await asyncio.sleep(0)
        bench.world.gates["call"].set()
        assert (await running).state is EpisodeState.READY


async def test_time_between_steps_counts_as_the_callers(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, episode_idle_s=10_000)
    async with talking(bench, clock=clock) as client:
        await client.start_episode(request(limits={"run_s": 100}))
        clock.advance(1000)
        assert (await client.run_episode("e", SAY)).state is EpisodeState.READY
        bench.world.gates["call"] = asyncio.Event()
        running = asyncio.create_task(client.run_episode("e", SAY))
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        clock.advance(100)
        bench.world.gates["call"].set()
        await running
        view = await client.run_episode("e", SAY)
        assert view.last is not None
        assert view.last.stop_reason is StopReason.TIME_LIMIT


async def test_episodes_and_jobs_share_the_limits(make_bench: Any) -> None:
    bench = await make_bench(max_jobs_with_sandbox=2, episodes=3)
    bench.world.gates["call"] = asyncio.Event()
    async with talking(bench, attempts=1) as client:
        await client.submit([bench.group("jobs", samples=4)])
        await bench.world.until(lambda: bench.world.inside["call"] == 2)
        starting = asyncio.create_task(client.start_episode(request("first")))
        while not len(bench.service.episodes):  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0)
        assert (await client.episode("first")).state is EpisodeState.WAITING
        await client.cancel_job("jobs/0")
        assert (await starting).state is EpisodeState.READY, "before the jobs that wait"
        assert bench.world.log.count(("jobs", "init")) == 2
        waiting = [asyncio.create_task(client.start_episode(request(name))) for name in ("b", "c")]
        while len(bench.service.episodes) < 3:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0)
        with pytest.raises(QueueFull) as full:
            await client.start_episode(request("d"))
        assert full.value.retry_after_s > 0
        for name in ("b", "c"):
            await client.close_episode(name)
        for task in waiting:
            with pytest.raises(NotFound):
                await task
        assert bench.service.status().jobs_with_sandbox == 2
        await client.close_episode("first")
        bench.world.gates["call"].set()
        await bench.finished(4)


async def test_a_pause_holds_new_episodes_and_a_drain_refuses_them(bench: Any, client: RolloutClient) -> None:
    bench.service.pause(Pause.FINISH)
    starting = asyncio.create_task(client.start_episode(request()))
    while not len(bench.service.episodes):  # noqa: ASYNC110 - the service has no event for it
        await asyncio.sleep(0)
    assert (await client.episode("e")).state is EpisodeState.WAITING
    await client.resume()
    await starting
    await client.drain()
    with pytest.raises(Unavailable, match="draining"):
        await client.start_episode(request("late"))
    assert (await client.run_episode("e", SAY)).state is EpisodeState.READY, "what is there goes on"


async def test_a_stop_closes_all_episodes(bench: Any, client: RolloutClient) -> None:
    await client.start_episode(request("idle"))
    await client.start_episode(request("busy", faults={"call": "hang"}))
    running = asyncio.create_task(client.run_episode("busy", SAY))
    await bench.world.until(lambda: bench.world.inside["call"] == 1)
    await bench.service.stop()
    assert bench.world.open == 0
    with pytest.raises(NotFound):
        await running


async def test_a_wrong_step_is_refused(bench: Any, client: RolloutClient) -> None:
    await client.start_episode(request())
    wrong: list[Any] = [
        {},
        {"agent": False},
        {"ids": [-1]},
        {"ids": [1], "logprobs": []},
        {"ids": [1], "finish_reason": "abort"},
        {"ids": [1], "agent": True},
        {"tool_calls": []},
        {"tool_calls": [{"name": ""}]},
        {"tool_calls": [{"name": "say", "arguments": "text"}]},
        [],
        None,
    ]
    transport = httpx.ASGITransport(create_app(bench.service, ServerSettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for body in wrong:
            response = await http.post("/v1/episodes/e/run", json=body)
            assert response.json()["error"]["type"] == "invalid_request", body
        for path, content in (
            ("/v1/episodes/e/run", '{"ids": [1], "logprobs": [NaN]}'),
            ("/v1/episodes/e/run", '{"tool_calls": [{"name": "\\ud800"}]}'),
            (
                "/v1/episodes",
                '{"id": "n", "environment": "toy", "task": {"id": "t", "instruction": "do", "reward": NaN}}',
            ),
        ):
            response = await http.post(path, content=content, headers={"content-type": "application/json"})
            assert response.json()["error"]["type"] == "invalid_request", content
    assert bench.world.log == [("e", "init")]


async def test_time_for_which_an_endpoint_held_turns_is_not_subtracted_from_later_steps(
    renderer: TemplateRenderer,
) -> None:
    clock, families = FakeClock(), {"toy": ToyWorld().family()}
    agent = Agent(renderer, ToyModel(renderer, lambda *_: "unused"), clock)
    worker = Worker(empty_node(), families, agent, clock, grace_s=1, close_s=1)
    asked = request()
    job = Job(asked.as_group(), 0, families["toy"].load(asked.task), clock.monotonic())
    assert await worker.perform(job, Stage.INIT) is None
    assert await worker.step(job, None) is None
    with job.attempt.transcript.held.counting(clock.monotonic):
        clock.advance(10)
    for _ in range(2):
        assert await worker.step(job, SAY) is None
    assert job.attempt.active_s[Stage.RUN] == 0
    assert await worker.close(job)
