"""The agent loop with a real tokenizer: its requests, its records and its stop reasons."""

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from prorl_envs.errors import ModelError, SandboxError
from prorl_envs.model.tokens.chat_template import ChatTemplate
from prorl_envs.model.tokens.rendering import LONG, TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.agent.agent_loop import Agent, Transcript
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import AgentLimits, StopReason, Trajectory
from prorl_envs.testing.scripted import Call
from prorl_envs.testing.tokenizer import CHAT_TEMPLATE, builtin_renderer
from tests.support.clock import FakeClock
from tests.support.toy import Fault, Play, ToyModel, ToyTask, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

FINISH: Call = {"tool": "finish", "arguments": {}}


def say(text: str) -> Call:
    return {"tool": "say", "arguments": {"text": text}}


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return builtin_renderer()


class Played:
    """One run of the loop, with everything to inspect afterwards."""

    def __init__(self, renderer: TemplateRenderer, play: Play, **limits: float) -> None:
        self.world = ToyWorld()
        self.clock = FakeClock()
        self.model = ToyModel(renderer, play)
        self.transcript = Transcript()
        self.limits = AgentLimits.model_validate(limits)
        self.sampling = Sampling(max_tokens=400)
        self.faults: dict[str, Fault] = {}
        self._renderer = renderer

    async def run(self) -> StopReason:
        environment = self.world.family()(empty_node())
        prompt = await environment.init(ToyTask(id="t", instruction="Say it.", faults=self.faults))
        agent = Agent(self._renderer, self.model, self.clock)
        try:
            loop = await agent.begin(
                environment,
                prompt,
                self.transcript,
                limits=self.limits,
                sampling=self.sampling,
                session="s",
            )
            return await loop.finish()
        finally:
            await environment.close()

    @property
    def trajectory(self) -> Trajectory:
        assert isinstance(self.transcript.ledger, Ledger)
        return self.transcript.ledger.trajectory()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return self.model.prompts["s"]

    def roles(self) -> list[str]:
        return [message["role"] for message in self.transcript.messages]


def check_truth(played: Played) -> None:
    """Check the invariants of every trajectory."""
    trajectory = played.trajectory
    assert trajectory.drift == 0
    assert len(trajectory.ids) == len(trajectory.loss_mask) == len(trajectory.logprobs)
    assert len(trajectory.ids) <= played.limits.max_tokens
    sampled: set[int] = set()
    for prompt, turn in zip(played.prompts, trajectory.turns, strict=False):
        assert list(prompt) == trajectory.ids[: turn.start], "the prompt sent is not the ledger so far"
        sampled.update(range(turn.start, turn.end))
    assert [i for i, mask in enumerate(trajectory.loss_mask) if mask] == sorted(sampled)
    assert all(trajectory.logprobs[i] == 0.0 for i in range(len(trajectory.ids)) if i not in sampled)


async def test_the_context_grows_by_sampled_and_observed_tokens(renderer: TemplateRenderer) -> None:
    turns = [[say("one")], [say("two"), say("three")], [FINISH]]
    played = Played(renderer, lambda _, turn: turns[turn])
    assert await played.run() is StopReason.FINISHED
    check_truth(played)
    for before, after in zip(played.prompts, played.prompts[1:], strict=False):
        assert after[: len(before)] == before
    text = renderer.decode(played.trajectory.ids)
    assert [text.index(word) for word in ("one", "two", "three")] == sorted(
        text.index(word) for word in ("one", "two", "three")
    )
    assert played.roles() == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [turn.weight_version for turn in played.trajectory.turns] == ["7", "7", "7"]


async def test_logprobs_are_those_of_the_sampled_ids(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda _, turn: [say("x")] if turn == 0 else "done")
    await played.run()
    for turn in played.trajectory.turns:
        ids = played.trajectory.ids[turn.start : turn.end]
        assert played.trajectory.logprobs[turn.start : turn.end] == [-0.01 * (i % 100) for i in ids]


async def test_text_without_a_call_finishes_the_episode(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: "I am done.")
    assert await played.run() is StopReason.NO_TOOL_CALL
    assert played.transcript.messages[-1]["content"] == "I am done."
    check_truth(played)


async def test_a_looping_agent_is_stopped(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("again")], max_repeats=3)
    assert await played.run() is StopReason.LOOP
    assert len(played.trajectory.turns) == 3
    check_truth(played)
    free = Played(renderer, lambda *_: [say("again")], max_turns=5)
    assert await free.run() is StopReason.TURN_LIMIT


async def test_the_middle_of_long_observations_is_cut(renderer: TemplateRenderer) -> None:
    long = "".join(f"{n} " for n in range(1000))
    played = Played(
        renderer, lambda _, turn: [say(long)] if turn == 0 else [FINISH], max_observation_chars=300
    )
    played.sampling = Sampling(max_tokens=8000)
    assert await played.run() is StopReason.FINISHED
    seen = played.transcript.messages[2]["content"]
    assert len(seen) < 350 and "characters left out]" in seen
    assert seen in renderer.decode(played.trajectory.ids)
    check_truth(played)


class Noting(TemplateRenderer):
    """Renderer that records the threads in which it makes bridges."""

    threads: list[bool]

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().bridge(sampled, observations)


async def test_slow_rendering_does_not_block_the_event_loop(renderer: TemplateRenderer) -> None:
    """Both ways of encoding yield the same tokens."""
    noting = Noting(renderer.tokenizer, ChatTemplate(CHAT_TEMPLATE))
    noting.threads = []
    turns = [[say("short")], [say("long <|im_end|> " * (LONG // 10))], [FINISH]]
    played = Played(noting, lambda _, turn: turns[turn], max_tokens=100_000)
    played.sampling = Sampling(max_tokens=50_000)
    assert await played.run() is StopReason.FINISHED
    assert noting.threads == [True, False]
    check_truth(played)
    observed = played.prompts[2][played.trajectory.turns[1].end :]
    said = noting.decode(observed)
    assert turns[1][0]["arguments"]["text"] in said
    pieces = re.split("(?<=long <)", said)  # where the mark that keeps control tokens out of tool output is
    assert list(observed) == [
        number
        for piece in pieces
        for number in renderer.tokenizer.encode(piece, add_special_tokens=False).ids
    ]


async def test_a_reserve_keeps_room_for_the_last_answer(renderer: TemplateRenderer) -> None:
    """An observation that would fill the context is cut, and the model is asked once to finish."""
    turns = [[say("x y z " * 300)], [say("more")], [FINISH]]
    bounds = {"max_tokens": 2800}
    ended = Played(renderer, lambda _, turn: turns[turn], **bounds)
    ended.sampling = Sampling(max_tokens=2000)
    assert await ended.run() is StopReason.TOKEN_LIMIT
    played = Played(renderer, lambda _, turn: turns[turn], **bounds, reserve_tokens=300)
    played.sampling = ended.sampling
    assert await played.run() is StopReason.FINISHED
    assert played.roles() == ["user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    assert "characters left out]" in played.transcript.messages[2]["content"]
    assert "about 300 tokens" in played.transcript.messages[3]["content"]
    check_truth(played)


async def test_a_refused_finish_continues_the_episode(renderer: TemplateRenderer) -> None:
    refused: Call = {"tool": "finish", "arguments": {"text": "refuse"}}
    played = Played(renderer, lambda _, turn: [refused] if turn == 0 else [FINISH])
    assert await played.run() is StopReason.FINISHED
    assert played.trajectory.turns[1].start > played.trajectory.turns[0].end


async def test_calls_after_finish_are_not_executed(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("a"), FINISH, say("b")])
    await played.run()
    assert [step for _, step in played.world.log].count("call") == 2


async def test_a_malformed_call_is_answered_with_the_reason(renderer: TemplateRenderer) -> None:
    def play(_: str, turn: int) -> list[Call] | str:
        return '<tool_call>\n{"name": "say", "argu\n</tool_call>' if turn == 0 else [FINISH]

    played = Played(renderer, play)
    assert await played.run() is StopReason.FINISHED
    check_truth(played)
    assert played.roles() == ["user", "assistant", "user", "assistant"]
    assert "argu" in played.transcript.messages[1]["content"]
    assert played.transcript.messages[2]["content"]


async def test_repeated_malformed_calls_stop_the_episode(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: "<tool_call>{", max_malformed=3)
    assert await played.run() is StopReason.MALFORMED
    assert len(played.trajectory.turns) == 3


async def test_a_valid_call_resets_the_count_of_malformed_ones(renderer: TemplateRenderer) -> None:
    played = Played(
        renderer,
        lambda _, turn: [say("ok")] if turn % 2 else "<tool_call>{",
        max_malformed=2,
        max_turns=7,
    )
    assert await played.run() is StopReason.TURN_LIMIT
    assert len(played.trajectory.turns) == 7


async def test_a_truncated_answer_is_explained_to_the_model(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda _, turn: "words " * 50 if turn == 0 else [FINISH])
    played.sampling = Sampling(max_tokens=20)
    played.limits = AgentLimits(max_malformed=3)
    await played.run()
    check_truth(played)
    assert played.trajectory.turns[0].finish_reason == "length"
    assert "cut off after 20 tokens" in played.transcript.messages[2]["content"]


async def test_the_token_limit_shrinks_the_last_answer(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: "word " * 500)
    await asyncio.wait_for(_fill(played, extra=30), timeout=30)
    assert played.model.samplings["s"][-1].max_tokens == 30
    assert len(played.trajectory.ids) == played.limits.max_tokens


async def _fill(played: Played, extra: int) -> None:
    probe = Played(played._renderer, lambda *_: "x")
    await probe.run()
    played.limits = AgentLimits(max_tokens=len(probe.prompts[0]) + extra)
    assert await played.run() is StopReason.TOKEN_LIMIT
    check_truth(played)


async def test_an_observation_that_does_not_fit_is_omitted(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("long " * 300)], max_tokens=1200)
    played.sampling = Sampling(max_tokens=1000)
    assert await played.run() is StopReason.TOKEN_LIMIT
    check_truth(played)
    last = played.trajectory.turns[-1]
    assert last.end == len(played.trajectory.ids), "the trajectory ends with what was sampled"
    assert played.roles()[-1] == "assistant"


async def test_a_prompt_over_the_limit_is_not_sent(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: "x", max_tokens=16)
    assert await played.run() is StopReason.TOKEN_LIMIT
    assert played.model.prompts == {}


async def test_the_turn_limit(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("again")], max_turns=4)
    assert await played.run() is StopReason.TURN_LIMIT
    assert len(played.prompts) == 4


@pytest.mark.parametrize(("tool_s", "model_s"), [(6, 4), (4, 6)])
async def test_a_model_call_at_the_time_limit(
    renderer: TemplateRenderer, tool_s: float, model_s: float
) -> None:
    """The episode is graded if the policy used up the time, but not if a single model call did."""
    played = Played(renderer, lambda *_: [say("never")], run_s=10)
    answering = asyncio.Event()
    answering.set()

    def play(_: str, turn: int) -> list[Call]:
        answering.clear()  # the next answer never arrives
        return [say("x")]

    played.model = ToyModel(renderer, play, gate=answering)
    played.world.gates["call"] = asyncio.Event()
    running = asyncio.create_task(played.run())
    await played.world.until(lambda: played.world.inside["call"] == 1)
    played.clock.advance(tool_s)
    played.world.gates["call"].set()
    await played.clock.wait_for_sleepers()
    played.clock.advance(model_s)
    if tool_s > model_s:
        assert await running is StopReason.TIME_LIMIT
    else:
        with pytest.raises(ModelError, match="did not answer in 6 of 10 s"):
            await running
    assert len(played.trajectory.turns) == 1


async def test_a_model_that_never_answers_is_a_failure_without_a_grade(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("never")], run_s=10)
    played.model = ToyModel(renderer, lambda *_: "x", gate=asyncio.Event())
    running = asyncio.create_task(played.run())
    await played.clock.wait_for_sleepers()
    played.clock.advance(10)
    with pytest.raises(ModelError, match="did not answer in 10 of 10 s"):
        await running
    assert played.trajectory.turns == []


async def test_a_tool_call_is_limited_to_the_remaining_time(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("slow"), say("late")], run_s=10, tool_timeout_s=8)
    first, second = asyncio.Event(), asyncio.Event()
    played.world.gates["call"] = first
    running = asyncio.create_task(played.run())
    await played.world.until(lambda: len(played.world.call_timeouts) == 1)
    played.clock.advance(7)
    await played.world.until(lambda: played.world.inside["call"] == 1)
    played.world.gates["call"] = second
    first.set()
    await played.world.until(lambda: len(played.world.call_timeouts) == 2)
    played.clock.advance(4)
    second.set()
    assert await running is StopReason.TIME_LIMIT
    assert played.world.call_timeouts == [8, 3], "its own limit, then the rest of the episode's time"
    assert played.trajectory.turns[0].tools_s == 11
    check_truth(played)


async def test_text_that_utf8_cannot_encode_is_replaced(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda _, turn: [say("x")] if turn == 0 else [FINISH])
    played.faults = {"call": Fault.SURROGATE}
    await played.run()
    check_truth(played)
    json.dumps(played.transcript.messages, ensure_ascii=False).encode()


async def test_a_failing_sandbox_raises_its_own_error(renderer: TemplateRenderer) -> None:
    played = Played(renderer, lambda *_: [say("x")])
    played.faults = {"call": Fault.SANDBOX}
    with pytest.raises(SandboxError):
        await played.run()
    assert len(played.trajectory.turns) == 1, "what happened before can still be seen"


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "message"),
    [
        ((1, 2), (0.0,), "stop", "log-probabilities"),
        ((1,) * 500, (0.0,) * 500, "stop", "the limit was 400"),
        ((1,), (0.0,), "abort", "aborted"),
    ],
)
async def test_an_answer_that_violates_the_protocol(
    renderer: TemplateRenderer,
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    reason: str,
    message: str,
) -> None:
    class Broken(ToyModel):
        async def generate(self, prompt_ids: object, sampling: object, *, session: str) -> Sampled:
            return Sampled(ids, logprobs, reason, "", "")  # type: ignore[arg-type]

    played = Played(renderer, lambda *_: "x")
    played.model = Broken(renderer, lambda *_: "x")
    with pytest.raises(ModelError, match=message):
        await played.run()
