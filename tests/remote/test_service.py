"""Tasks of a resources server in the three stages: success and every failure."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from prorl_envs.errors import FailureKind
from prorl_envs.remote import environment
from prorl_envs.rollout.api.types import JobState, Stage, StopReason
from tests.support.resources import ResourcesDesk, answers, count_to_three, desk_row, message_text

pytestmark = pytest.mark.anyio

type Roll = Callable[..., Any]


async def test_an_episode_runs_through_the_stages(desk: ResourcesDesk, roll: Roll) -> None:
    (result,) = await roll(desk_row(say="three", id=7))
    assert (result.state, result.reward, result.task_id) == (JobState.DONE, 1.0, "7")
    assert result.stop_reason is StopReason.NO_TOOL_CALL
    assert result.components == {"count": 3.0, "right": 1.0}
    assert result.evidence == {"count": 3, "right": True}  # and none of the repeated calls
    shown = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert shown == ['{"success":true}', '{"success":true}', '{"count":3}']
    assert [tool["function"]["name"] for tool in result.tools] == ["add", "read"]
    assert result.trajectory is not None and result.trajectory.drift == 0


async def test_the_verifier_gets_the_row_the_messages_and_the_calls(desk: ResourcesDesk, roll: Roll) -> None:
    row = desk_row(say="three", reference=[{"tool": "add", "arguments": {}}])
    await roll(row)
    (body,) = desk.verified
    assert {key: body[key] for key in ("responses_create_params", "start", "expected", "say")} == {
        key: value for key, value in row.items() if key != "reference"
    }
    assert "reference" not in body
    output = body["response"]["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    outputs = [item for item in output if item["type"] == "function_call_output"]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [
        ("add", {"count": 1}),
        ("add", {"count": 2}),
        ("read", {}),
    ]
    assert [c["call_id"] for c in calls] == [o["call_id"] for o in outputs]
    assert len({c["call_id"] for c in calls}) == 3
    assert message_text(output) == "It is three."


async def test_samples_have_separate_sessions(desk: ResourcesDesk, roll: Roll) -> None:
    results = await roll(desk_row(), samples=4)
    assert [result.reward for result in results] == [1.0] * 4
    assert sorted(desk.counts.values()) == [3] * 4


async def test_a_wrong_answer_is_a_reward_of_0(roll: Roll) -> None:
    (result,) = await roll(desk_row(expected=4))
    assert (result.state, result.reward) == (JobState.DONE, 0.0)


async def test_a_finishing_tool_ends_the_episode_and_its_call_is_graded(
    desk: ResourcesDesk, roll: Roll
) -> None:
    (result,) = await roll(desk_row(expected=1), finish_tool="add")
    assert (result.stop_reason, result.reward) == (StopReason.FINISHED, 1.0)
    kinds = [item["type"] for item in desk.verified[0]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"]  # though the model never saw the output


async def test_mistakes_of_the_model_are_reported_to_the_model(desk: ResourcesDesk, roll: Roll) -> None:
    def play(session: str, turn: int) -> Any:
        calls = [("add", {"count": "x"}), ("seed_session", {"start": 3}), ("../verify", {}), ("verify", {})]
        return [{"tool": name, "arguments": arguments} for name, arguments in calls] if turn == 0 else "Done."

    (result,) = await roll(desk_row(), play)
    told = [m["content"] for m in result.messages if m["role"] == "tool"]
    assert "an integer is expected" in told[0] and all("There is no tool" in text for text in told[1:])
    assert result.reward == 0.0
    assert desk.asked == {"seed_session": 1, "add": 1, "verify": 1}  # a model cannot choose the route


# Verdicts.

NESTED = '{"reward": 1.0, "deep": ' + '{"a": ' * 100 + "1" + "}" * 101


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"reward": NaN}', "NaN is not valid JSON"),
        ('{"reward": 1e999}', "not a finite number"),
        ('{"reward": true}', "not a finite number"),
        ('{"reward": null}', "not a finite number"),
        ('{"reward": "1"}', "not a finite number"),
        ('{"reward": ' + "9" * 400 + "}", "not a finite number"),
        ("{}", "not a finite number"),
        ("[1.0]", "not a JSON object"),
        ("1.0", "not a JSON object"),
        ('{"reward": 1.0', "not JSON"),
        (b'{"reward": 1.0, "x": "\xff"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        (NESTED, "nested"),
        ('{"reward": 1.0, "pad": "' + "x" * 5000 + '"}', "longer than"),
    ],
)
async def test_an_invalid_verdict_has_no_reward(
    desk: ResourcesDesk, roll: Roll, monkeypatch: pytest.MonkeyPatch, body: bytes | str, says: str
) -> None:
    if says == "longer than":
        monkeypatch.setattr(environment, "MAX_ANSWER_BYTES", 1000)
    desk.misbehave("verify", answers(body))
    (result,) = await roll(desk_row())
    assert (result.state, result.reward) == (JobState.FAILED, None)
    assert result.failure.kind is FailureKind.GRADER and result.failure.stage is Stage.EVAL
    assert says in result.failure.message
    assert result.mask_sample


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        ({"mask_sample": True}, FailureKind.ENVIRONMENT),
        ({"mask_sample": True, "failure_kind": "verifier_error"}, FailureKind.GRADER),
        ({"mask_sample": True, "failure_kind": "prorl:tool"}, FailureKind.TOOL),
        ({"_ng_failure_class": "prorl:environment"}, FailureKind.ENVIRONMENT),
    ],
)
async def test_a_masked_sample_is_a_failure(
    desk: ResourcesDesk, roll: Roll, mask: dict[str, Any], kind: FailureKind
) -> None:
    masked = {"reward": 0.0, "failure_reason": "the judge is away", **mask}
    desk.misbehave("verify", answers(json.dumps(masked)), times=2)
    (result,) = await roll(desk_row())
    assert (result.reward, result.failure.kind) == (None, kind)
    assert "the judge is away" in result.failure.message


async def test_evidence_is_bounded_and_omitted_parts_are_named(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("verify", answers(json.dumps({"reward": 0.5, "why": "so", "log": "x" * 300_000})))
    (result,) = await roll(desk_row())
    assert result.reward == 0.5 and result.evidence == {"why": "so", "left_out": ["log"]}


async def test_an_error_of_the_verifier_has_no_reward(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("verify", answers('"KeyError(1)"', 500))
    (result,) = await roll(desk_row())
    assert (result.reward, result.failure.kind, result.attempts) == (None, FailureKind.GRADER, 1)
    assert "KeyError(1)" in result.failure.message


async def test_an_unreachable_verifier_gets_the_request_of_another_attempt(
    desk: ResourcesDesk, roll: Roll
) -> None:
    desk.misbehave("verify", answers("busy", 503))
    (result,) = await roll(desk_row())
    assert (result.reward, result.attempts) == (1.0, 2)
    assert desk.asked["seed_session"] == 2  # a new session, and not the old one twice


# Seeds.


async def test_a_retried_seed_is_a_session_of_its_own(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("seed_session", answers("", 503, headers={"set-cookie": "desk_session=stale"}), broken_off)
    (result,) = await roll(desk_row())
    assert (result.reward, result.attempts, desk.asked["seed_session"]) == (1.0, 1, 3)
    assert "stale" not in desk.counts


async def test_a_refused_row_is_not_retried(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("seed_session", answers('{"detail": "initial_count: Field required"}', 422))
    (result,) = await roll(desk_row())
    assert (result.failure.kind, result.attempts) == (FailureKind.ENVIRONMENT, 1)
    assert "initial_count" in result.failure.message and desk.asked["seed_session"] == 1


async def test_an_unreachable_server_is_a_retryable_failure(roll: Roll) -> None:
    (result,) = await roll(desk_row(), url="http://127.0.0.1:1")
    assert (result.failure.kind, result.failure.stage) == (FailureKind.ENVIRONMENT, Stage.INIT)
    assert result.failure.retryable and result.attempts == 2


async def test_a_seed_has_a_time_limit(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("seed_session", hangs, times=9)
    (result,) = await roll(desk_row(), seed_s=0.05)
    assert result.failure.kind is FailureKind.ENVIRONMENT and "0.05 s" in result.failure.message


async def test_cookies_are_bounded(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("seed_session", answers("{}", headers={"set-cookie": "a=" + "b" * 20_000}), times=9)
    (result,) = await roll(desk_row())
    assert "cookies" in result.failure.message


# Tools.


async def broken_off(request: Request) -> Response:
    async def body() -> Any:
        yield b"beginning"
        raise ConnectionResetError

    return StreamingResponse(body(), headers={"content-length": "1000"})


async def hangs(request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(("route", "reward"), [("", 1.0), ("add", None), ("verify", None)])
async def test_a_typed_session_is_closed_whatever_happens(
    desk: ResourcesDesk, roll: Roll, route: str, reward: float | None
) -> None:
    desk.typed = []
    if route:
        desk.misbehave(route, broken_off, times=10)
    (result,) = await roll(desk_row(say="three"))
    assert result.reward == reward
    assert desk.asked["seed_session"] == desk.asked["close_session"] >= 1 and desk.typed == []
    assert not any("task_data" in body or "resources_session_id" in body for body in desk.verified)


@pytest.mark.parametrize("unclear", [broken_off, answers("", 503), hangs])
async def test_the_form_of_the_seed_is_asked_until_the_server_answers(
    desk: ResourcesDesk, roll: Roll, monkeypatch: pytest.MonkeyPatch, unclear: Any
) -> None:
    monkeypatch.setattr(environment, "ASIDE_S", 0.5)
    desk.typed = []
    desk.misbehave("openapi.json", unclear)
    (result,) = await roll(desk_row(say="three"))
    assert (result.reward, result.attempts, desk.asked["seed_session"]) == (1.0, 1, 1)


async def test_a_server_that_does_not_describe_itself_gets_seeds_of_the_old_form(
    desk: ResourcesDesk, roll: Roll
) -> None:
    desk.misbehave("openapi.json", answers("", 404))
    assert [result.reward for result in await roll(desk_row(say="three"), samples=2)] == [1.0, 1.0]


async def test_an_interrupted_tool_call_fails_the_attempt_and_is_not_repeated(
    desk: ResourcesDesk, roll: Roll
) -> None:
    desk.misbehave("add", broken_off, broken_off)
    (result,) = await roll(desk_row())
    assert (result.reward, result.failure.kind, result.failure.stage) == (None, FailureKind.TOOL, Stage.RUN)
    assert (result.attempts, desk.asked["add"], desk.asked["seed_session"]) == (2, 2, 2)


async def test_an_unreachable_tool_server_fails_the_attempt(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("add", answers("", 502))
    (result,) = await roll(desk_row(), count_to_three)
    assert (result.reward, result.attempts) == (1.0, 2)


@pytest.mark.parametrize(("fails", "state"), [(False, JobState.DONE), (True, JobState.FAILED)])
async def test_an_internal_error_of_a_tool_is_shown_or_fails_the_attempt(
    desk: ResourcesDesk, roll: Roll, fails: bool, state: JobState
) -> None:
    desk.misbehave("add", answers("\"ValueError('no such city')\"", 500), times=2)
    (result,) = await roll(desk_row(), fail_on_500=fails)
    assert result.state is state
    if not fails:
        assert "no such city" in result.messages[2]["content"]


async def test_a_long_answer_is_cut_and_marked(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("add", answers("y" * 1_000_000))
    (result,) = await roll(desk_row(), tool_bytes=100)
    text = result.messages[2]["content"]
    assert text.startswith("y" * 100 + "\n[only the first 100 bytes") and len(text) < 200


async def test_a_compressed_answer_is_not_unpacked(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("add", answers(b"\x1f\x8b", headers={"content-encoding": "gzip"}), times=2)
    (result,) = await roll(desk_row())
    assert result.failure.kind is FailureKind.TOOL and "compressed" in result.failure.message


async def test_a_slow_tool_is_stopped_and_the_model_notified(desk: ResourcesDesk, roll: Roll) -> None:
    desk.misbehave("add", hangs)
    (result,) = await roll(desk_row(), limits={"tool_timeout_s": 0.05})
    assert "ended after 0.05 s" in result.messages[2]["content"]
    assert result.state is JobState.DONE
