"""Promises of a resources server's sessions, tested with an environment that writes to a directory."""

import asyncio
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.env.rows import validate_row
from prorl_envs.errors import (
    Cancelled,
    FailureKind,
    GraderError,
    InputError,
    RolloutFailure,
    SandboxError,
    StageTimeout,
)
from prorl_envs.nemo.sessions import SessionExpired, SessionLimits, SessionLost, Sessions, SessionsFull
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec

pytestmark = pytest.mark.anyio

ROW = {"id": "t1", "instruction": "Write the note 'alpha'.", "expected": "alpha"}
WRITE = ToolSpec("write", "Write the note.", {"type": "object", "properties": {"text": {"type": "string"}}})


class NoteTask(Task):
    """`fault` names the step at which this task's infrastructure fails."""

    expected: str
    fault: str = ""


class Note(Environment[NoteTask]):
    name = "note"
    task_type = NoteTask

    def __init__(self, node: Node, root: Path, gate: asyncio.Event) -> None:
        super().__init__(node)
        self.root = root
        self.gate = gate
        self.path: Path | None = None

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> NoteTask:
        return validate_row(NoteTask, row)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return [WRITE]

    async def init(self, task: NoteTask) -> Prompt:
        self.task = task
        self.path = self.root / f"note-{id(self)}"
        self.path.mkdir()
        await self._may_fail("init")
        return self.prompt(task)

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        await self._may_fail("call")
        assert self.path is not None
        (self.path / "note").write_text(str(call.arguments.get("text")))
        return ToolResult(text="written")

    async def eval(self) -> Grade:
        await self._may_fail("eval")
        assert self.path is not None
        note = self.path / "note"
        exact = note.exists() and note.read_text() == self.task.expected
        return Grade(reward=float("nan") if self.task.fault == "nan" else float(exact))

    async def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            await self._may_fail("close")

    async def _may_fail(self, stage: str) -> None:
        if self.task.fault == f"{stage}-hangs":
            await self.gate.wait()
        if self.task.fault == stage:
            raise SandboxError(f"the sandbox ended during {stage}")
        if self.task.fault == f"{stage}-bug":
            raise ZeroDivisionError("a bug")


class _NoSandboxes:
    name = "none"
    sandboxes: Collection[Sandbox] = ()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("this driver starts nothing")

    async def aclose(self) -> None:
        pass


class House:
    """Sessions with their own clock, and a directory with an entry for every open episode."""

    def __init__(self, root: Path, **limits: Any) -> None:
        self.root = root
        self.gate = asyncio.Event()
        self.now = 0.0
        node = Node(_NoSandboxes(), root)
        self.sessions = Sessions(
            lambda: Note(node, root, self.gate), SessionLimits(**limits), clock=lambda: self.now
        )

    @property
    def open_episodes(self) -> int:
        return len(list(self.root.iterdir()))

    async def write(self, session_id: str, text: str) -> ToolResult:
        return await self.sessions.call(session_id, ToolCall("c", "write", {"text": text}))


async def until(condition: Any) -> None:
    """Let the other tasks run until `condition()`; the test's own time limit bounds it."""
    while not condition():  # noqa: ASYNC110  (the condition is inside the code under test)
        await asyncio.sleep(0)


async def test_an_episode_is_seeded_used_and_graded_and_leaves_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    prompt = await house.sessions.open("s", ROW)
    assert prompt.messages[0]["content"] == ROW["instruction"]
    assert (await house.write("s", "alpha")).text == "written"
    assert house.open_episodes == 1
    assert (await house.sessions.grade("s")).reward == 1.0
    assert house.open_episodes == 0
    ended = house.sessions.ended("s")
    assert ended is not None and ended.task_id == "t1"


async def test_a_repeated_grading_returns_the_same(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.open("s", ROW)
    first, second = await asyncio.gather(house.sessions.grade("s"), house.sessions.grade("s"))
    assert first is second is await house.sessions.grade("s")
    assert first.reward == 0.0


async def test_after_the_grade_all_calls_are_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.open("s", ROW)
    await house.sessions.grade("s")
    with pytest.raises(InputError, match="is over"):
        await house.write("s", "alpha")
    with pytest.raises(InputError, match="has ended"):
        await house.sessions.open("s", ROW)


async def test_a_model_cannot_replace_its_task_by_seeding_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.open("s", ROW)
    with pytest.raises(InputError, match="another task"):
        await house.sessions.open("s", ROW | {"expected": "easy"})
    await house.write("s", "easy")
    assert (await house.sessions.grade("s")).reward == 0.0


async def test_a_repeated_seed_finds_the_same_episode(tmp_path: Path) -> None:
    house = House(tmp_path)
    await asyncio.gather(house.sessions.open("s", ROW), house.sessions.open("s", dict(ROW)))
    assert (len(house.sessions), house.open_episodes) == (1, 1)
    await house.sessions.aclose()


async def test_a_wrong_row_names_its_field_and_opens_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(InputError, match="expected"):
        await house.sessions.open("s", {"id": "t1", "instruction": "x"})
    assert (len(house.sessions), house.open_episodes) == (0, 0)
    with pytest.raises(SessionLost):
        await house.sessions.grade("s")


@pytest.mark.parametrize("stage", ["init", "call", "eval"])
async def test_an_internal_failure_closes_the_episode_without_a_reward(tmp_path: Path, stage: str) -> None:
    house = House(tmp_path)
    with pytest.raises(SandboxError, match=stage):
        await house.sessions.open("s", ROW | {"fault": stage})
        await house.write("s", "alpha")
        await house.sessions.grade("s")
    assert house.open_episodes == 0
    for _ in range(2):
        with pytest.raises(SandboxError, match=stage):
            await house.sessions.grade("s")
    with pytest.raises(SandboxError, match=stage):
        await house.write("s", "alpha")


async def test_a_bug_in_a_tool_is_raised_and_fails_the_episode(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.open("s", ROW | {"fault": "call-bug"})
    with pytest.raises(ZeroDivisionError):
        await house.write("s", "alpha")
    with pytest.raises(RolloutFailure, match="ZeroDivisionError") as caught:
        await house.sessions.grade("s")
    assert caught.value.kind is FailureKind.INTERNAL
    assert house.open_episodes == 0


async def test_a_reward_that_is_not_a_number_is_a_grader_failure(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.open("s", ROW | {"fault": "nan"})
    with pytest.raises(GraderError):
        await house.sessions.grade("s")


@pytest.mark.parametrize(("stage", "limit"), [("init", "init_s"), ("eval", "eval_s")])
async def test_a_hanging_stage_is_stopped(tmp_path: Path, stage: str, limit: str) -> None:
    house = House(tmp_path, **{limit: 0.01})
    with pytest.raises(StageTimeout):
        await house.sessions.open("s", ROW | {"fault": f"{stage}-hangs"})
        await house.sessions.grade("s")
    assert house.open_episodes == 0


async def test_idle_episodes_expire_and_busy_ones_do_not(tmp_path: Path) -> None:
    house = House(tmp_path, idle_s=10)
    await house.sessions.open("idle", ROW)
    await house.sessions.open("busy", ROW | {"fault": "call-hangs"})
    call = asyncio.create_task(house.write("busy", "alpha"))
    await asyncio.sleep(0)
    house.now = 11
    assert await house.sessions.expire() == 1
    with pytest.raises(SessionExpired):
        await house.sessions.grade("idle")
    house.gate.set()
    await call
    assert await house.sessions.expire() == 0
    assert (await house.sessions.grade("busy")).reward == 1.0


async def test_a_session_used_while_others_expire_stays_open(tmp_path: Path) -> None:
    """The close of the first session blocks; meanwhile the second session is used, and the third is in a
    call."""
    house = House(tmp_path, idle_s=10)
    await house.sessions.open("first", ROW | {"fault": "close-hangs"})
    await house.sessions.open("second", ROW)
    await house.sessions.open("third", ROW | {"fault": "call-hangs"})
    await house.sessions.open("fourth", ROW)
    house.now = 11
    sweep = asyncio.create_task(house.sessions.expire())
    await until(lambda: len(house.sessions) == 3)
    await house.write("second", "alpha")
    call = asyncio.create_task(house.write("third", "alpha"))
    await asyncio.sleep(0)
    await house.sessions.grade("fourth")
    house.gate.set()
    assert await sweep == 1
    await call
    for name in ("second", "third"):
        assert (await house.sessions.grade(name)).reward == 1.0


async def test_a_repeated_seed_counts_as_use(tmp_path: Path) -> None:
    house = House(tmp_path, idle_s=10)
    await house.sessions.open("s", ROW)
    house.now = 8
    await house.sessions.open("s", ROW)
    house.now = 16
    assert await house.sessions.expire() == 0
    await house.sessions.aclose()


async def test_a_call_during_the_close_of_an_idle_session_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path, idle_s=10)
    await house.sessions.open("s", ROW | {"fault": "close-hangs"})
    house.now = 11
    sweep = asyncio.create_task(house.sessions.expire())
    await until(lambda: len(house.sessions) == 0)
    with pytest.raises(SessionExpired):
        await house.write("s", "alpha")
    house.gate.set()
    assert await sweep == 1


@pytest.mark.parametrize("step", ["init", "call", "eval"])
async def test_a_close_stops_the_running_step_at_once(tmp_path: Path, step: str) -> None:
    house = House(tmp_path)
    row = ROW | {"fault": f"{step}-hangs"}
    opening = asyncio.create_task(house.sessions.open("s", row))
    await until(lambda: house.open_episodes == 1)
    running: asyncio.Task[Any] = opening
    if step != "init":
        await opening
        work = house.write("s", "alpha") if step == "call" else house.sessions.grade("s")
        running = asyncio.create_task(work)
        await asyncio.sleep(0)
    await house.sessions.close("s")
    assert house.open_episodes == 0
    with pytest.raises(Cancelled, match="closed before it was graded"):
        await running
    await house.sessions.close("s")
    with pytest.raises(InputError, match="has ended"):
        await house.sessions.open("s", ROW)


async def test_a_close_prevents_a_later_seed(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.sessions.close("never seeded")
    with pytest.raises(InputError, match="has ended"):
        await house.sessions.open("never seeded", ROW)
    assert house.open_episodes == 0


async def test_a_waiting_seed_shortens_the_time_that_others_may_be_idle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, open=2, idle_s=60)
    for name in ("oldest", "older"):
        await house.sessions.open(name, ROW)
        house.now += 5
    house.now += 6
    assert await house.sessions.expire() == 0
    waiting = asyncio.create_task(house.sessions.open("new", ROW))
    await until(lambda: "all 2 sandboxes are in use" in caplog.text)
    assert await house.sessions.expire() == 1  # the other one is not idle for long enough
    await waiting
    with pytest.raises(SessionExpired, match="more than 10 s while others waited"):
        await house.sessions.grade("oldest")
    await house.write("older", "alpha")
    await house.sessions.aclose()


async def test_a_seed_does_not_wait_forever(tmp_path: Path) -> None:
    house = House(tmp_path, open=1, queue_s=0.01)
    await house.sessions.open("first", ROW)
    with pytest.raises(SessionsFull, match=r"no sandbox was free for 0\.01 s"):
        await house.sessions.open("second", ROW)
    await house.sessions.aclose()


async def test_recorded_answers_are_graded_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    call = {"type": "function_call", "call_id": "c", "name": "write", "arguments": '{"text": "alpha"}'}
    broken = [call | {"arguments": text} for text in ("{", "[]", '{"text": "alpha", "x": NaN}')]
    for output, reward in (([*broken, call], 1.0), (broken, 0.0)):
        assert (await house.sessions.regrade(ROW, output)).reward == reward
    for row, refused in ((ROW | {"fault": "init"}, SandboxError), ({}, InputError)):
        with pytest.raises(refused):
            await house.sessions.regrade(row, [call])
    assert house.open_episodes == 0


async def test_an_episode_is_graded_again_in_a_free_sandbox_in_limited_time(tmp_path: Path) -> None:
    house = House(tmp_path, open=1, queue_s=0.01, init_s=0.01, eval_s=0.01)
    await house.sessions.open("s", ROW)
    with pytest.raises(SessionsFull):
        await house.sessions.regrade(ROW, [])
    await house.sessions.close("s")
    with pytest.raises(StageTimeout, match=r"The replay took longer than 0\.02 s"):
        await house.sessions.regrade(ROW | {"fault": "eval-hangs"}, [])
    assert house.open_episodes == 0
    await house.sessions.open("t", ROW)  # the sandbox is free again
    await house.sessions.aclose()


async def test_episodes_wait_for_a_place_in_order(tmp_path: Path) -> None:
    house = House(tmp_path, open=1)
    await house.sessions.open("first", ROW)
    waiting = [asyncio.create_task(house.sessions.open(name, ROW)) for name in ("second", "third")]
    await until(lambda: len(house.sessions) == 3)
    assert house.open_episodes == 1
    await house.sessions.grade("first")
    await waiting[0]
    assert house.open_episodes == 1 and not waiting[1].done()
    await house.sessions.grade("second")
    await waiting[1]
    await house.sessions.aclose()
    assert house.open_episodes == 0


async def test_requests_over_the_queue_limit_get_a_retryable_failure(tmp_path: Path) -> None:
    house = House(tmp_path, open=1, waiting=1)
    await house.sessions.open("first", ROW)
    second = asyncio.create_task(house.sessions.open("second", ROW))
    await until(lambda: len(house.sessions) == 2)
    with pytest.raises(SessionsFull) as caught:
        await house.sessions.open("third", ROW)
    assert caught.value.retryable
    await house.sessions.grade("first")
    await second
    await house.sessions.aclose()


async def test_a_failed_start_releases_its_slot(tmp_path: Path) -> None:
    house = House(tmp_path, open=1)
    for number in range(3):
        with pytest.raises(SandboxError):
            await house.sessions.open(f"s{number}", ROW | {"fault": "init"})
    await house.sessions.open("good", ROW)
    await house.sessions.aclose()


async def test_an_episode_that_fails_to_close_keeps_its_grade_and_releases_its_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, open=1)
    await house.sessions.open("s", ROW | {"fault": "close"})
    assert (await house.sessions.grade("s")).reward == 0.0
    assert "the sandbox ended during close" in caplog.text
    await house.sessions.open("next", ROW)
    await house.sessions.aclose()


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    start = asyncio.create_task(house.sessions.open("s", ROW | {"fault": "init-hangs"}))
    await until(lambda: house.open_episodes == 1)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert house.open_episodes == 0
    with pytest.raises(Cancelled):
        await house.sessions.grade("s")


async def test_closing_closes_every_episode_and_keeps_all_outcomes(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in ("a", "b"):
        await house.sessions.open(name, ROW)
    await house.sessions.aclose()
    assert (len(house.sessions), house.open_episodes) == (0, 0)
    with pytest.raises(Cancelled):
        await house.sessions.grade("a")


async def test_remembered_outcomes_are_bounded(tmp_path: Path) -> None:
    house = House(tmp_path, remembered=2)
    for name in ("a", "b", "c"):
        await house.sessions.open(name, ROW)
        await house.sessions.grade(name)
    assert (await house.sessions.grade("c")).reward == 0.0
    with pytest.raises(SessionLost):
        await house.sessions.grade("a")
