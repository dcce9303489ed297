"""Promises of every family in a sandbox: order of calls, answers to wrong calls, no leaks."""

from pathlib import Path

import pytest

from prorl_envs.env.base import Grade, Task
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import MAX_ANSWER_CHARS, SandboxedEnvironment
from prorl_envs.errors import EnvironmentFault, GraderError, InputError, ProrlError, SandboxError
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, FINISH
from prorl_envs.tools.types import ToolCall, ToolResult


class ToyTask(Task):
    """Task that fails at the step `fault`."""

    fault: str = ""


class ToyEnvironment(SandboxedEnvironment[ToyTask]):
    """Environment whose task is to write `done` into a file."""

    name = "toy"
    task_type = ToyTask
    sandbox_tools = (BASH,)
    finish_spec = FINISH
    system_prompt = "Be quick."
    call_timeout_s = 5.0

    async def prepare(self, task: ToyTask, session: SandboxSession) -> None:
        if task.fault == "prepare":
            raise EnvironmentFault("cannot be prepared")
        await session.tools.write(f"{session.sandbox.spec.workdir}/state", b"new\n")

    async def grade(self, task: ToyTask, session: SandboxSession) -> Grade:
        if task.fault == "grade":
            raise GraderError("cannot be graded")
        state = await session.tools.read(f"{session.sandbox.spec.workdir}/state")
        return Grade(reward=float(state == b"done\n"))


TASK = ToyTask(id="t", instruction="Write done to the file state.")
SOLVE = "echo done > state"


async def bash(env: ToyEnvironment, command: str) -> ToolResult:
    return await env.call(ToolCall(id="c", name="bash", arguments={"command": command}))


@pytest.mark.anyio
async def test_an_episode(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        prompt = await env.init(TASK)
        assert [message["role"] for message in prompt.messages] == ["system", "user"]
        assert [tool.name for tool in prompt.tools] == ["bash", "finish"]
        assert (await bash(env, SOLVE)).ok
        finished = await env.call(ToolCall(id="f", name="finish", arguments={}))
        assert finished.ok
        assert (await env.eval()).reward == 1.0


@pytest.mark.anyio
async def test_the_prompt_is_known_without_a_sandbox(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        assert env.prompt(TASK) == await env.init(TASK)


@pytest.mark.anyio
async def test_calls_out_of_order_are_environment_faults(node: Node) -> None:
    env = ToyEnvironment(node)
    with pytest.raises(EnvironmentFault, match="call: the episode is new"):
        await bash(env, "true")
    with pytest.raises(EnvironmentFault, match="eval: the episode is new"):
        await env.eval()
    await env.init(TASK)
    with pytest.raises(EnvironmentFault, match="init: the episode is ready"):
        await env.init(TASK)
    await env.eval()
    with pytest.raises(EnvironmentFault, match="eval: the episode is graded"):
        await env.eval()
    with pytest.raises(EnvironmentFault, match="call: the episode is graded"):
        await bash(env, "true")
    await env.close()
    await env.close()
    with pytest.raises(EnvironmentFault, match="call: the episode is closed"):
        await bash(env, "true")


@pytest.mark.anyio
async def test_wrong_calls_are_answered_and_not_raised(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        await env.init(TASK)
        unknown = await env.call(ToolCall(id="c", name="ipython", arguments={"code": "1"}))
        assert not unknown.ok
        assert "bash, finish" in unknown.text
        for arguments in ({}, {"command": 1}, {"command": "true", "more": 1}, {"command": "a\0b"}):
            result = await env.call(ToolCall(id="c", name="bash", arguments=arguments))
            assert not result.ok
            assert result.text
        assert (await bash(env, SOLVE)).ok


@pytest.mark.anyio
async def test_an_answer_that_cannot_be_serialised_is_refused(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        await env.init(TASK)
        for answer in ("\ud800", "x" * (MAX_ANSWER_CHARS + 1), ["42"]):
            refused = await env.call(ToolCall(id="f", name="finish", arguments={"answer": answer}))
            assert not refused.ok
        assert env.answer is None


@pytest.mark.anyio
async def test_calls_after_finish_are_refused(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        await env.init(TASK)
        await env.call(ToolCall(id="f", name="finish", arguments={}))
        assert not (await bash(env, SOLVE)).ok
        assert (await env.eval()).reward == 0.0


@pytest.mark.anyio
async def test_the_familys_time_limit_applies_if_the_caller_sets_none(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        await env.init(TASK)
        result = await env.call(
            ToolCall(id="c", name="bash", arguments={"command": "while :; do :; done"}), timeout_s=0.2
        )
        assert not result.ok
        assert result.data["timed_out"]


@pytest.mark.anyio
@pytest.mark.parametrize(("fault", "error"), [("prepare", EnvironmentFault), ("grade", GraderError)])
async def test_failures_are_typed_and_leave_nothing(node: Node, fault: str, error: type[ProrlError]) -> None:
    with pytest.raises(error, match="cannot be"):
        async with ToyEnvironment(node) as env:
            await env.init(ToyTask(id="t", instruction="x", fault=fault))
            await env.eval()


@pytest.mark.anyio
async def test_a_sandbox_that_dies_is_a_sandbox_error(node: Node) -> None:
    async with ToyEnvironment(node) as env:
        await env.init(TASK)
        assert env._session is not None
        await env._session.sandbox.close()
        with pytest.raises(SandboxError):
            await bash(env, "true")
        with pytest.raises(SandboxError):
            await env.eval()


@pytest.mark.anyio
async def test_close_after_a_failed_start(run_dir: Path) -> None:
    async with Node.local(cache_dir=run_dir / "cache") as closed:
        pass
    env = ToyEnvironment(closed)
    with pytest.raises(SandboxError):
        await env.init(TASK)
    await env.close()


def test_load_names_the_field() -> None:
    with pytest.raises(InputError, match="fault"):
        ToyEnvironment.load({"id": "a", "instruction": "x", "fault": 1})
