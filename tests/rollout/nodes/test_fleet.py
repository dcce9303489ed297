"""Jobs on several nodes: the real head and the real nodes in one event loop."""

import asyncio
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prorl_envs.config import ServerSettings
from prorl_envs.errors import FailureKind
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.errors import NotFound, OutOfOrder
from prorl_envs.rollout.api.interactive import (
    AgentStep,
    CallRequest,
    CallStep,
    EpisodeRequest,
    EpisodeState,
    TokenStep,
)
from prorl_envs.rollout.api.types import JobState
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.nodes.messages import ServerChoice, TurnRequested
from prorl_envs.rollout.nodes.remote_sampling import RoutedModel
from prorl_envs.testing.scripted import as_message
from tests.support.clock import FakeClock
from tests.support.toy import ToyModel

pytestmark = pytest.mark.anyio


async def test_a_result_from_a_node_equals_a_local_one(make_site: Any, renderer: TemplateRenderer) -> None:
    def play(session: str, turn: int) -> Any:
        said = {"tool": "say", "arguments": {"text": f"turn {turn} \ud83d\ude00"}}
        return [said] if turn < 2 else [{"tool": "finish", "arguments": {"reward": 0.25}}]

    results = []
    for head in (True, False):
        site = await make_site(model=ToyModel(renderer, play), head=head)
        if not head:
            await site.join("a")
        await site.submit(samples=2)
        results.append(sorted(await site.results(2), key=lambda result: result.sample))
    for local, remote in zip(*results, strict=True):
        ignored = {"timings", "cursor", "trajectory"}
        assert remote.model_dump(exclude=ignored) == local.model_dump(exclude=ignored)
        assert remote.reward == 0.25 and not remote.mask_sample
        mine, theirs = local.trajectory, remote.trajectory
        assert (theirs.ids, theirs.loss_mask, theirs.logprobs) == (mine.ids, mine.loss_mask, mine.logprobs)
        assert [turn.server for turn in theirs.turns] == ["in-process"] * 3
        assert remote.timings.run_s > 0 and remote.timings.model_s > 0 and remote.timings.queued_s > 0


async def test_jobs_spread_over_the_nodes_and_a_late_one_gets_work(make_site: Any) -> None:
    site = await make_site()
    for name in ("a", "b"):
        await site.join(name, run=2, max_jobs_with_sandbox=2, init=2)
        site.worlds[name].gates["call"] = asyncio.Event()
    await site.submit(samples=6)
    for name in ("a", "b"):
        await site.worlds[name].until(lambda name=name: site.worlds[name].inside["call"] == 2)
    assert site.service.status().pools["init"].waiting == 2
    await site.join("late", run=2, max_jobs_with_sandbox=2)
    late = site.worlds["late"]
    await late.until(lambda: late.entered["g", "close"] == 2)
    for name in ("a", "b"):
        site.worlds[name].gates["call"].set()
    assert {result.state for result in await site.results(6)} == {JobState.DONE}
    assert site.here.log == [], "the head's machine takes none"


async def test_jobs_of_a_lost_node_run_again_on_another(make_site: Any) -> None:
    site = await make_site()
    await site.join("a", run=1, max_jobs_with_sandbox=3, init=3)
    world = site.worlds["a"]
    world.gates["call"] = asyncio.Event()
    await site.submit(samples=3)
    await world.until(lambda: world.inside["call"] == 1 and world.entered["g", "init"] == 3)
    await site.nodes["a"].cut()
    assert world.open == 0, "a node that loses its head closes everything"
    await site.join("b")
    results = await site.results(3)
    assert [(r.state, r.attempts, r.failure) for r in results] == [(JobState.DONE, 2, None)] * 3
    assert site.service.status().retries == 3


async def test_a_job_that_loses_every_node_fails_with_the_reason(make_site: Any) -> None:
    site = await make_site(attempts=2)
    for name in ("a", "b"):
        await site.join(name)
        world = site.worlds[name]
        world.gates["call"] = asyncio.Event()
        if name == "a":
            await site.submit()
        await world.until(lambda world=world: world.inside["call"] == 1)
        await site.nodes[name].cut()
    [result] = await site.results(1)
    assert (result.state, result.reward, result.mask_sample, result.attempts) == (
        JobState.FAILED,
        None,
        True,
        2,
    )
    assert result.failure.kind is FailureKind.NODE and "b" in result.failure.message


async def test_cancelling_stops_the_stage_on_its_node_and_keeps_the_transcript(
    make_site: Any, renderer: TemplateRenderer
) -> None:
    def play(session: str, turn: int) -> Any:
        return [{"tool": "say", "arguments": {"text": "once"}}] if turn == 0 else [{"tool": "finish"}]

    site = await make_site(model=ToyModel(renderer, play))
    await site.join("a")
    world = site.worlds["a"]
    world.gates["call"] = asyncio.Event()
    await site.submit()
    await world.until(lambda: world.inside["call"] == 1)
    view = await site.service.groups.cancel_job("g/0")
    assert view.state is JobState.CANCELLED
    [result] = await site.results(1)
    assert [message["role"] for message in result.messages] == ["user", "assistant"]
    assert result.trajectory is not None and len(result.trajectory.turns) == 1
    await site.settled()
    assert (world.open, len(site.nodes["a"].worker)) == (0, 0)


@pytest.mark.parametrize(
    ("step", "fault", "kind"),
    [
        ("init", "environment", FailureKind.ENVIRONMENT),
        ("call", "tool", FailureKind.TOOL),
        ("eval", "nan", FailureKind.GRADER),
        ("init", "crash", FailureKind.INTERNAL),
    ],
)
async def test_failures_keep_their_kind(
    make_site: Any, step: str, fault: str, kind: FailureKind, caplog: pytest.LogCaptureFixture
) -> None:
    site = await make_site()
    await site.join("a")
    await site.submit(faults={step: fault})
    [result] = await site.results(1)
    assert (result.state, result.failure.kind, result.reward) == (JobState.FAILED, kind, None)
    assert result.failure.stage == {"call": "run"}.get(step, step)
    assert result.timings.run_s > 0 or step == "init"


async def test_a_failed_attempt_is_repeated_on_another_node(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    await site.join("b")
    await site.submit(faults={"call": "once_sandbox"}, samples=1)
    await site.results(1)
    assert {name for name, world in site.worlds.items() if world.log} == {"a", "b"}


async def test_a_drained_node_finishes_its_jobs_and_gets_no_new_ones(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    await site.join("b")
    site.fleet.drain("a")
    await site.submit("one", samples=4)
    await site.results(4)
    await site.settled()
    assert site.worlds["a"].log == []
    site.fleet.undrain("a")
    world = site.worlds["b"]
    world.gates["call"] = asyncio.Event()
    await site.submit("two", samples=4)
    await world.until(lambda: world.inside["call"] == 2)
    site.fleet.drain("b")
    await site.submit("three", samples=4)
    world.gates["call"].set()
    assert {result.state for result in await site.results(12)} == {JobState.DONE}
    assert not any(group == "three" for group, _ in world.log)
    assert [(view.name, view.state) for view in site.fleet.views()] == [("a", "ready"), ("b", "draining")]
    assert site.service.status().retries == 0


async def test_nodes_are_listed_drained_and_resumed_over_http(make_site: Any) -> None:
    site = await make_site()
    await site.join("a", run=3)
    transport = httpx.ASGITransport(create_app(site.service, ServerSettings()))
    async with RolloutClient("http://127.0.0.1", transport=transport) as client:
        [listed] = await client.nodes()
        assert (listed.name, listed.state) == ("a", "ready")
        assert listed.pools is not None and listed.pools["run"].limit == 3
        assert [node.state for node in await client.drain_node("a")] == ["draining"]
        assert [node.state for node in await client.resume_node("a")] == ["ready"]
        with pytest.raises(NotFound, match="no node 'b'"):
            await client.drain_node("b")


async def test_stopping_stops_stages_on_nodes(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    world = site.worlds["a"]
    world.gates["call"] = asyncio.Event()
    await site.submit(samples=4)
    await world.until(lambda: world.inside["call"] == 4)
    await site.service.stop()
    assert world.open == 0
    assert {result.state for result in await site.results(4)} == {JobState.CANCELLED}


async def test_a_node_with_another_tokenizer_or_without_an_environment_is_refused(
    make_site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = await make_site(terms={"fingerprint": "other"})
    node = await other.join("a", ready=False)
    await node.gone()
    assert "tokenizer" in node.problem
    lacking = await make_site(terms={"environments": ["toy", "rare"]})
    node = await lacking.join("a", ready=False)
    await node.gone()
    assert "rare" in node.problem


async def test_a_node_that_rejoins_is_a_new_one(make_site: Any) -> None:
    site = await make_site()
    first = await site.join("a")
    await first.cut()
    await site.join("a", ready=False)
    await site.submit()
    await site.results(1)
    assert [(node.name, node.state) for node in site.fleet.nodes] == [("a~2", "ready"), ("a", "lost")]


async def test_turns_are_held_on_nodes_while_weights_change(make_site: Any) -> None:
    clock = FakeClock()
    site = await make_site(clock=clock)
    await site.join("a")
    await site.pool.pause("finish")
    await site.submit(limits={"run_s": 5})
    [node] = site.fleet.nodes
    while not node.turns:  # noqa: ASYNC110 - until it asks for its first turn
        await asyncio.sleep(0)
    late = await site.join("late")
    clock.advance(20.0)  # longer than the stage's deadline
    for _ in range(20):
        await asyncio.sleep(0)
    assert site.model.prompts == {} and late.worker._model._gate.closed
    await site.pool.resume("9")
    [result] = await site.results(1)
    assert (result.reward, result.timings.held_s, result.timings.run_s) == (1.0, 20.0, 0.0)


async def test_a_turn_interrupted_by_a_pause_is_continued(make_site: Any, renderer: TemplateRenderer) -> None:
    gate = asyncio.Event()
    model = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}], gate=gate)
    site = await make_site(model=model)
    await site.join("a")
    await site.submit()
    while not model.prompts:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await site.pool.pause("abort", wait_s=5)
    assert site.pool.in_flight == 0
    gate.set()
    await site.pool.resume("9")
    [result] = await site.results(1)
    assert result.reward == 1.0 and len(next(iter(model.prompts.values()))) == 2


async def test_a_turn_moves_from_a_server_that_fails_on_the_node(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    site.pool.add("http://down")
    gate = site.worlds["a"].gates["init"] = asyncio.Event()  # so that all turns are in flight at once
    for number in range(4):
        await site.submit(f"g{number}")
    await site.worlds["a"].until(lambda: sum(site.worlds["a"].entered.values()) == 4)
    gate.set()
    assert [(result.reward, result.attempts) for result in await site.results(4)] == [(1.0, 1)] * 4
    assert {server.url: server.problem for server in site.pool.servers}["http://down"] == "it is down"


async def test_a_pause_returns_when_every_node_has_confirmed_it(make_site: Any) -> None:
    site = await make_site()
    nodes = [await site.join(name) for name in ("a", "b")]
    for node in nodes:
        node.handle.hold_gate = asyncio.Event()
    pausing = asyncio.create_task(site.pool.pause("finish", resample=True))
    for node in nodes:
        await run_ready_callbacks()
        assert not pausing.done()
        node.handle.hold_gate.set()
    await pausing
    for node in nodes:
        assert node.worker._model._resample and node.worker._model._gate.closed
    await site.pool.resume("9")
    assert not any(node.worker._model._gate.closed for node in nodes)


async def test_a_pause_does_not_wait_for_a_hung_node(make_site: Any) -> None:
    clock = FakeClock()
    site = await make_site(clock=clock, terms={"heartbeat_timeout_s": 30.0})
    hung, other = await site.join("hung"), await site.join("other")
    hung.handle.silent = True
    pausing = asyncio.create_task(site.pool.pause("finish"))
    for _ in range(7):
        clock.advance(5.0)
        await run_ready_callbacks()
    await pausing
    assert {node.name: node.state for node in site.fleet.nodes} == {"hung": "lost", "other": "ready"}
    assert other.worker._model._gate.closed
    await hung.cut()


async def test_a_node_that_does_not_answer_is_lost_and_closes_everything(make_site: Any) -> None:
    """Head and node act independently: the head repeats the job on another node, and the node stops its
    attempt."""
    clock = FakeClock()
    site = await make_site(clock=clock, terms={"heartbeat_timeout_s": 30.0})
    hung = await site.join("hung")
    world = site.worlds["hung"]
    world.gates["call"] = asyncio.Event()
    await site.submit()
    await world.until(lambda: world.inside["call"] == 1)
    await site.join("other")
    hung.handle.silent = True
    for _ in range(8):
        clock.advance(5.0)
        await run_ready_callbacks()
    [result] = await site.results(1)
    assert (result.reward, result.attempts) == (1.0, 2)
    assert {node.name: node.reason for node in site.fleet.nodes}["hung"] == "it did not answer for 30 s"
    assert hung.worker.stopped.is_set() and world.open == 0
    await hung.cut()


async def test_an_interrupt_that_overtakes_its_stage_is_repeated(make_site: Any) -> None:
    """A transport may deliver calls in any order."""
    site = await make_site()
    node = await site.join("a")
    world = site.worlds["a"]
    world.gates["init"] = asyncio.Event()  # never set
    node.handle.perform_gate = asyncio.Event()
    await site.submit()
    while not site.service.status().pools["init"].active:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await run_ready_callbacks()
    await site.service.groups.cancel_job("g/0")
    node.handle.perform_gate.set()
    await site.settled()
    assert world.open == 0 and len(node.worker) == 0


async def test_a_call_that_was_stopped_before_it_arrived_does_not_sample(renderer: TemplateRenderer) -> None:
    model = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}])
    routed = RoutedModel(lambda url: model, FakeClock())
    prompt = renderer.prompt([{"role": "user", "content": "Do it."}], ())
    turn = asyncio.create_task(routed.generate(prompt, Sampling(), session="s"))
    [request] = cast(list[TurnRequested], await routed.messages())
    server = ServerChoice("http://model", "http://model", "1")
    await routed.stop_turn(request.turn, 1, None)
    assert (await routed.sample(request.turn, 1, server)).finish_reason == "abort"
    [request] = cast(list[TurnRequested], await routed.messages())  # the turn is routed again
    assert (await routed.sample(request.turn, 1, server)).finish_reason == "stop"
    assert (await turn).ids and len(model.prompts["s"]) == 1


async def run_ready_callbacks() -> None:
    """Run all callbacks that are ready, until only timers are pending."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_the_heads_metrics_show_each_node(make_site: Any) -> None:
    site = await make_site(head=True)

    def seen() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(site.service.metrics.text().decode())
        return {
            (one.name, *(value for _, value in sorted(one.labels.items()))): one.value
            for family in families
            for one in family.samples
        }

    await site.join("head", ready=False, run=3, max_jobs_with_sandbox=5)
    for name in ("a", "b"):
        await site.join(name, run=3, max_jobs_with_sandbox=5)
    while len(site.fleet.heartbeats()) < 3:  # noqa: ASYNC110 - the first message of a node is a heartbeat
        await asyncio.sleep(0)
    await site.nodes["b"].cut()
    found = seen()
    assert found["prorl_node_state", "b", "lost"] == 1
    assert found["prorl_node_state", "a", "ready"] == found["prorl_node_state", "head~2", "ready"] == 1
    assert found["prorl_node_pool_limit", "a", "run"] == 3
    assert (
        found["prorl_node_max_jobs_with_sandbox", "a"] == 5
        and found["prorl_node_jobs_with_sandbox", "a"] == 0
    )
    assert {key[1] for key in found if key[0] == "prorl_sandboxes_open"} == {"head", "a", "head~2"}
    assert found["prorl_sandbox_ready_seconds_count", "a"] == 0
    assert found["prorl_node_cpu_seconds_total", "a"] > 0
    assert found["prorl_node_resident_memory_bytes", "a"] > 1_000_000
    assert not any("b" in key[1:] for key in found if key[0] != "prorl_node_state"), "it is gone"


async def steps(site: Any, *taken: Any) -> Any:
    """Drive an episode with these steps, and grade it."""
    task = {"id": "e", "instruction": "Do e."}
    asked = EpisodeRequest(id="e", environment="toy", task=task)
    view = await site.service.start_episode(asked, wait_s=30)
    assert view.state is EpisodeState.READY, view.failure
    for step in taken:
        view = await site.service.episodes.step("e", step, wait_s=30)
        assert view.failure is None
    return await site.service.episodes.evaluate("e", wait_s=30)


async def test_an_episode_driven_on_a_node_equals_a_local_one(make_site: Any, renderer: Any) -> None:
    ids = renderer.assistant(as_message([{"tool": "say", "arguments": {"text": "hi"}}]))
    by_tokens = [TokenStep(ids=list(ids), logprobs=[-0.5] * len(ids)), AgentStep(agent=True)]
    by_calls = [
        CallStep(tool_calls=[CallRequest(name="say", arguments={"text": "hi"})]),
        CallStep(tool_calls=[CallRequest(name="finish", arguments={"reward": 0.25})]),
    ]
    for taken in (by_tokens, by_calls):
        views = []
        for head in (True, False):
            site = await make_site(head=head)
            if not head:
                await site.join("a")
            views.append(await steps(site, *taken))
            assert (site.here.entered["e", "eval"] == 1) is head
            await site.service.episodes.close("e")
            assert site.service.status().jobs_with_sandbox == 0
            assert head or not len(site.nodes["a"].worker)
        local, remote = views
        assert local.last is not None and remote.last == local.last
        ignored = {"timings", "trajectory"}
        assert remote.result.model_dump(exclude=ignored) == local.result.model_dump(exclude=ignored)
        assert remote.result.timings.run_s > 0
        if taken is by_tokens:
            assert remote.result.trajectory.ids == local.result.trajectory.ids
            assert remote.result.trajectory.logprobs == local.result.trajectory.logprobs


async def test_an_episode_whose_node_is_lost_fails_with_the_reason(make_site: Any) -> None:
    site = await make_site()
    node = await site.join("a")
    task = {"id": "e", "instruction": "Do e."}
    await site.service.start_episode(EpisodeRequest(id="e", environment="toy", task=task), wait_s=30)
    await node.cut()
    say = CallStep(tool_calls=[CallRequest(name="say", arguments={"text": "hi"})])
    view = await site.service.episodes.step("e", say, wait_s=30)
    assert view.state is EpisodeState.FAILED
    assert view.failure.kind is FailureKind.NODE and view.result.reward is None
    await site.service.episodes.close("e")
    assert site.service.status().jobs_with_sandbox == 0


async def test_an_episode_with_an_endpoint_runs_on_the_head(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    task = {"id": "e", "instruction": "Do e."}
    for name, endpoint in (("here", True), ("there", False)):
        asked = EpisodeRequest(id=name, environment="toy", task=task, endpoint=endpoint)
        await site.service.start_episode(asked, wait_s=30)
    assert (site.here.open, site.worlds["a"].open) == (1, 1)
    assert (await site.service.episodes.endpoint("here")).key
    with pytest.raises(OutOfOrder, match="another machine"):
        await site.service.episodes.endpoint("there")


async def test_the_time_of_steps_on_a_node_is_counted_once(make_site: Any) -> None:
    clock = FakeClock()
    site = await make_site(clock=clock)
    await site.join("a")
    world, episodes = site.worlds["a"], site.service.episodes
    task = {"id": "e", "instruction": "Do e."}
    await site.service.start_episode(EpisodeRequest(id="e", environment="toy", task=task), wait_s=30)
    say = CallStep(tool_calls=[CallRequest(name="say", arguments={"text": "hi"})])
    gate = world.gates["call"] = asyncio.Event()
    step = asyncio.create_task(episodes.step("e", say, wait_s=30))
    await world.until(lambda: world.inside["call"] == 1)
    clock.advance(5)
    gate.set()
    await step
    await episodes.step("e", say, wait_s=30)
    view = await episodes.evaluate("e", wait_s=30)
    assert view.result is not None and view.result.timings.run_s == 5


async def test_an_episode_and_a_group_of_the_same_id_are_independent(make_site: Any) -> None:
    site = await make_site()
    await site.join("a")
    world = site.worlds["a"]
    gate = world.gates["call"] = asyncio.Event()
    await site.submit("e")
    await world.until(lambda: world.inside["call"] == 1)
    task = {"id": "other", "instruction": "Do it."}
    await site.service.start_episode(EpisodeRequest(id="e", environment="toy", task=task), wait_s=30)
    gate.set()
    [result] = await site.results(1)
    assert (result.task_id, result.reward) == ("e", 1.0)
    finish = CallStep(tool_calls=[CallRequest(name="finish", arguments={"reward": 0.25})])
    await site.service.episodes.step("e", finish, wait_s=30)
    view = await site.service.episodes.evaluate("e", wait_s=30)
    assert view.result is not None and (view.task_id, view.result.reward) == ("other", 0.25)
