"""Episodes of terminal tasks: their image, their sandbox, and their steps."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.options import Options, with_options
from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.task import TerminalTask
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.sandbox.base import Network
from prorl_envs.tools.types import ToolCall, ToolResult

from .conftest import MakeRow

pytestmark = pytest.mark.anyio


class Episode:
    def __init__(self, env: TerminalEnvironment, task: TerminalTask) -> None:
        self.env, self.task = env, task

    async def bash(self, command: str) -> ToolResult:
        return await self.env.call(ToolCall(id="1", name="bash", arguments={"command": command}))

    async def finish(self) -> ToolResult:
        return await self.env.call(ToolCall(id="1", name="finish", arguments={}))

    async def next_step(self) -> ToolResult:
        return await self.env.call(ToolCall(id="1", name="next_step", arguments={}))

    async def solve(self) -> None:
        for call in self.task.reference:
            await self.env.call(ToolCall(id="1", name=call.tool, arguments=call.arguments))


@asynccontextmanager
async def episode(
    node: Node, row: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> AsyncIterator[Episode]:
    family = TerminalEnvironment
    if options:
        family = with_options("variant", TerminalEnvironment, Options(own=options))  # type: ignore[assignment]
    env = family(node)
    task = env.load(row)
    try:
        await env.init(task)
        yield Episode(env, task)
    finally:
        await env.close()


async def graded(node: Node, row: Mapping[str, Any], *commands: str) -> Grade:
    """Run commands as the agent, and grade."""
    async with episode(node, row) as one:
        for command in commands:
            await one.bash(command)
        return await one.env.eval()


async def test_an_untouched_image_scores_0_and_the_solution_1(node: Node, make_row: MakeRow) -> None:
    assert (await graded(node, make_row())).reward == 0
    async with episode(node, make_row()) as one:
        await one.solve()
        grade = await one.env.eval()
    assert grade.reward == 1 and grade.components == {"reward": 1}
    assert grade.evidence["steps"]["tests"]["exit_code"] == 0


async def test_the_agent_is_root_of_the_image(node: Node, make_row: MakeRow) -> None:
    async with episode(node, make_row()) as one:
        result = await one.bash(
            "pwd; id -u; echo $GREETING; cat data.txt; echo x > /etc/new; ls -1 /etc/new /logs"
        )
    assert result.text == "/app\n0\nhello\ndata\n/etc/new\n\n/logs:\nagent\nartifacts\nverifier\n"


async def test_the_agent_sees_neither_tests_nor_solution(node: Node, make_row: MakeRow) -> None:
    async with episode(node, make_row()) as one:
        result = await one.bash(
            "ls -d /tests /solution; grep -rl 'reward.txt' / --exclude-dir=proc --exclude-dir=sys"
        )
    assert result.data["exit_code"] != 0
    assert "/tests" not in result.text.replace("'/tests'", "") and "test.sh" not in result.text


async def test_settings_of_the_task_apply(node: Node, make_row: MakeRow) -> None:
    config = (
        '[environment]\nworkdir = "/opt/place"\nmemory_mb = 256\n'
        'network_mode = "allowlist"\nallowed_hosts = ["example.org"]\n'
        '[environment.env]\nONE = "1"\nTWO = "${TWO:-2}"\nTHREE = "${THREE}"\n'
    )
    options = {"variables": {"THREE": "3"}}
    async with episode(node, make_row(config=config), options) as one:
        spec = one.env._here("test").sandbox.spec
        result = await one.bash("pwd; echo $ONE $TWO $THREE $http_proxy")
    assert result.text == "/opt/place\n1 2 3 http://127.0.0.1:3128\n"
    assert spec.limits is not None and spec.limits.memory_bytes == 256 << 20
    assert spec.network.allow == ("example.org",)


@pytest.mark.parametrize(
    ("options", "allowed", "is_open"),
    [
        ({}, (), False),
        ({"public_network": ["a.org"]}, ("a.org",), False),
        ({"public_network": "open"}, (), True),
    ],
)
async def test_the_options_define_the_public_network(
    node: Node, make_row: MakeRow, options: dict[str, Any], allowed: tuple[str, ...], is_open: bool
) -> None:
    async with episode(node, make_row(), options) as one:
        network = one.env._here("test").sandbox.spec.network
    assert network.allow == allowed and network.open == is_open


async def test_options_give_no_network_to_a_task_without_one(node: Node, make_row: MakeRow) -> None:
    row = make_row(config='[environment]\nnetwork_mode = "no-network"\n')
    async with episode(node, row, {"public_network": "open"}) as one:
        assert one.env._here("test").sandbox.spec.network == Network()


async def test_a_task_cannot_read_variables_of_this_process(
    node: Node, make_row: MakeRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    row = make_row(config='[environment.env]\nSTOLEN = "${SECRET}"\n')
    with pytest.raises(EnvironmentFault, match="the variable SECRET has no value"):
        async with episode(node, row):
            pass


async def test_an_image_without_a_working_directory_starts_at_the_root(node: Node, make_row: MakeRow) -> None:
    row = make_row({"environment/Dockerfile": "FROM base\nRUN mkdir /app\n"})
    async with episode(node, row) as one:
        assert (await one.bash("pwd; echo hello > app/out.txt")).text == "/\n"
        assert (await one.env.eval()).reward == 1


async def test_a_ready_image_needs_no_dockerfile(node: Node, make_row: MakeRow) -> None:
    row = make_row({"environment/Dockerfile": None}, config='[environment]\ndocker_image = "base"\n')
    async with episode(node, row) as one:
        assert (await one.bash("cat /etc/image")).text == "from the image\n"


async def test_a_failed_build_names_file_and_line(node: Node, make_row: MakeRow) -> None:
    row = make_row({"environment/Dockerfile": "FROM base\nRUN echo said; false\n"})
    with pytest.raises(
        EnvironmentFault, match=r"built: environment/Dockerfile:2: RUN failed with exit status 1(?s:.*)said"
    ):
        async with episode(node, row):
            pass


async def test_an_image_is_built_once(node: Node, make_row: MakeRow) -> None:
    row = make_row({"environment/Dockerfile": "FROM base\nRUN head -c 9 /dev/urandom | base64 > /etc/made\n"})
    made = []
    for _ in range(2):
        async with episode(node, row) as one:
            made.append((await one.bash("cat /etc/made")).text)
    assert made[0] == made[1] != ""


async def test_a_health_check_has_to_succeed(node: Node, make_row: MakeRow) -> None:
    config = '[environment.healthcheck]\ncommand = "{}"\ninterval_sec = 0.01\nretries = 2\n'
    check = "mkdir /tmp/a || ls /tmp/a && false"
    with pytest.raises(EnvironmentFault, match="the health check failed 2 times"):
        async with episode(node, make_row(config=config.format(check))):
            pass
    second = "ls /tmp/b || {{ mkdir /tmp/b; false; }}".replace("{{", "{").replace("}}", "}")
    async with episode(node, make_row(config=config.replace("{}", second))) as one:
        assert (await one.bash("ls -d /tmp/b")).text == "/tmp/b\n"


async def test_the_agents_time_is_limited(node: Node, make_row: MakeRow) -> None:
    async with episode(node, make_row(config="[agent]\ntimeout_sec = 0.5\n")) as one:
        result = await one.bash("echo hello > out.txt; sleep 60")
        assert not result.ok and "timed out" in result.text
        await asyncio.sleep(0.5)
        assert "time for this task is over" in (await one.bash("echo late > out.txt")).text
        assert (await one.env.eval()).reward == 1


STEPS = {
    "instruction.md": None,
    "tests/test.sh": None,
    "solution/solve.sh": None,
    "steps/a/instruction.md": "First.\n",
    "steps/a/tests/test.sh": "#!/bin/bash\ncat /app/a > /logs/verifier/reward.txt\n",
    "steps/a/solution/solve.sh": "echo 1 > /app/a\n",
    "steps/b/instruction.md": "Second.\n",
    "steps/b/tests/test.sh": "#!/bin/bash\nls /app/a && cat /app/b > /logs/verifier/reward.txt\n",
    "steps/b/solution/solve.sh": "cat /app/given > /app/b\n",
    "steps/b/workdir/given": "0.5\n",
    "steps/b/workdir/setup.sh": "echo set up > /app/setup\n",
}


async def test_each_step_is_graded_on_the_files_of_the_steps_before(node: Node, make_row: MakeRow) -> None:
    row = make_row(STEPS, config='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n')
    async with episode(node, row) as one:
        assert one.task.instruction == "First.\n"
        assert (await one.bash("ls")).text == "data.txt\n"
        await one.bash("echo 1 > a")
        assert (await one.next_step()).text == "Second.\n"
        assert (await one.bash("pwd; cat a setup; cat given > b")).text == "/app\n1\nset up\n"
        assert "last step" in (await one.next_step()).text
        assert (await one.finish()).text == "Finished."
        grade = await one.env.eval()
    assert grade.reward == 0.75 and grade.components == {"a.reward": 1, "b.reward": 0.5}
    async with episode(node, row) as one:
        await one.solve()
        assert (await one.env.eval()).reward == 0.75


async def test_tasks_of_several_steps_say_so(node: Node, make_row: MakeRow) -> None:
    row = make_row(STEPS, config='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n')
    prompt = TerminalEnvironment(node).prompt(TerminalEnvironment.load(row))
    assert [tool.name for tool in prompt.tools] == ["bash", "str_replace_editor", "next_step", "finish"]
    assert prompt.messages[1]["content"] == (
        "The task has 2 steps. Call next_step when one is done; finish ends the task.\n\nFirst.\n"
    )
    prompt = TerminalEnvironment(node).prompt(TerminalEnvironment.load(make_row()))
    assert [tool.name for tool in prompt.tools] == ["bash", "str_replace_editor", "finish"]


async def test_a_reward_below_the_threshold_ends_the_task(node: Node, make_row: MakeRow) -> None:
    row = make_row(STEPS, config='[[steps]]\nname = "a"\nmin_reward = 0.5\n[[steps]]\nname = "b"\n')
    async with episode(node, row) as one:
        await one.bash("echo 0.4 > a")
        assert "is over" in (await one.next_step()).text
        assert "is finished" in (await one.bash("ls")).text
        grade = await one.env.eval()
    assert grade.reward == 0.2 and grade.components == {"a.reward": 0.4}


@pytest.mark.parametrize(("scoring", "reward"), [("mean", 0.5), ("final", 0)])
async def test_steps_that_an_agent_does_not_reach_score_0(
    node: Node, make_row: MakeRow, scoring: str, reward: float
) -> None:
    steps = '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'
    row = make_row(STEPS, config=f'multi_step_reward_strategy = "{scoring}"\n{steps}')
    assert (await graded(node, row, "echo 1 > a")).reward == reward


async def test_limits_of_the_settings_apply_to_every_step(node: Node, make_row: MakeRow) -> None:
    limited = with_options("limited", TerminalEnvironment, Options(limits={"open_files": 2048}))
    env = limited(node)
    task = env.load(make_row(STEPS, config='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n'))
    try:
        await env.init(task)
        for number in "ab":
            limits = env._here("test").sandbox.spec.limits  # type: ignore[attr-defined]
            assert limits.open_files == 2048, number
            await env.call(ToolCall(id="1", name="bash", arguments={"command": "echo 1 > a"}))
            await env.call(ToolCall(id="2", name="next_step", arguments={}))
    finally:
        await env.close()


async def test_tests_without_a_result_on_any_files_are_a_grader_failure(
    node: Node, make_row: MakeRow
) -> None:
    with pytest.raises(GraderError, match=r"wrote neither .* before the agent started"):
        await graded(node, make_row({"tests/test.sh": "#!/bin/bash\necho nothing\n"}))


async def test_tests_that_the_agent_breaks_score_0(node: Node, make_row: MakeRow) -> None:
    grade = await graded(node, make_row({"tests/test.sh": TEST_OF_BASE64}), "rm /bin/base64")
    assert grade.reward == 0
    assert "wrote neither" in grade.evidence["steps"]["tests"]["problem"]


TEST_OF_BASE64 = "#!/bin/bash\nset -e\nbase64 /etc/image\necho 1 > /logs/verifier/reward.txt\n"


async def test_provisioning_builds_the_image(node: Node, make_row: MakeRow) -> None:
    row = make_row({"environment/Dockerfile": "FROM base\nRUN echo provisioned > /etc/p\n"})
    lines: list[str] = []
    task = TerminalEnvironment.load(row)
    await TerminalEnvironment.provision(node, task, lines.append)
    assert lines == ["[1/2] FROM base", "[2/2] RUN echo provisioned > /etc/p"]
    lines.clear()
    await TerminalEnvironment.provision(node, task, lines.append)
    assert lines == []


async def test_a_next_step_that_the_agent_makes_impossible_ends_the_task(
    node: Node, make_row: MakeRow
) -> None:
    row = make_row(STEPS, config='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n')
    async with episode(node, row) as one:
        await one.bash("echo 1 > a; mkdir given")
        assert "The next step cannot start" in (await one.next_step()).text
        assert "is finished" in (await one.bash("ls")).text
        grade = await one.env.eval()
    assert grade.reward == 0.5, grade


async def test_the_network_is_closed_by_default(node: Node, make_row: MakeRow) -> None:
    async with episode(node, make_row()) as one:
        result = await one.bash("echo > /dev/tcp/192.0.2.1/80; ls /sys/class/net; echo [$http_proxy]")
    assert "Network is unreachable" in result.text and "[]" in result.text
