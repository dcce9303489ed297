"""Attacks on the verifier score 0 or have no effect; none makes the episode fail."""

from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault

from .conftest import MakeRow
from .test_env import episode, graded

pytestmark = pytest.mark.anyio

#: Test script that always gives the reward 1, so that another reward shows a failure of the verifier.
ONE = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
#: Test script that runs a program of the agent, as many tests do.
RUNS = "#!/bin/bash\n/bin/bash /app/program\necho 0 > /logs/verifier/reward.txt\n"


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/artifacts/a; mkfifo /logs/artifacts/pipe; ln -s / /logs/artifacts/root",
        "chmod 000 /logs /logs/verifier /app /etc /opt",
        "mkdir -p /tests/closed/in; chmod 000 /tests/closed/in /tests/closed /tests",
        "chmod 000 /",
        "head -c 9000000 /dev/zero > /logs/verifier/reward.json",
        "ln -s /proc/self/environ /logs/verifier/out; ln -s loop /app/loop; ln -s loop conftest.py",
        "kill -9 -1",
    ],
)
@pytest.mark.parametrize("separate", [False, True])
async def test_no_file_keeps_the_tests_from_running(
    node: Node, make_row: MakeRow, command: str, separate: bool
) -> None:
    files: dict[str, Any] = {"tests/test.sh": ONE}
    config = 'artifacts = [{source = "/app", exclude = ["*.pyc"]}, "/app/loop"]\n'
    if separate:
        files |= {"tests/Dockerfile": "FROM base\nCOPY . /tests/\n"}
        files["tests/test.sh"] = {"text": ONE, "executable": True}
        config += '[verifier]\nenvironment_mode = "separate"\n'
    assert (await graded(node, make_row(files, config=config), command)).reward == 1


@pytest.mark.parametrize(
    "program",
    [
        "kill -9 -1",
        "kill -9 $PPID",
        "rm -r /tests /logs/verifier",
        "rm -r /logs/verifier/*; mkfifo /logs/verifier/reward.json",
        "ln -s /etc/passwd /logs/verifier/reward.json",
        "head -c 3000000 /dev/zero",
        "echo '{\"reward\": 1e400}' > /logs/verifier/reward.json",
        "(for i in {1..9000}; do printf '{\"a\":'; done) > /logs/verifier/reward.json",
    ],
)
async def test_a_tested_program_that_disturbs_the_tests_scores_0(
    node: Node, make_row: MakeRow, program: str
) -> None:
    row = make_row({"tests/test.sh": RUNS}, config="[verifier]\ntimeout_sec = 20\n")
    async with episode(node, row) as one:
        await one.bash(f"cat > /app/program <<'END'\n{program}\nEND")
        grade = await one.env.eval()
    assert grade.reward == 0, grade.evidence


async def test_tests_are_never_in_the_agents_sandbox(node: Node, make_row: MakeRow) -> None:
    steps = {
        "instruction.md": None,
        "tests/test.sh": None,
        "solution/solve.sh": None,
        **{f"steps/{name}/instruction.md": "Do it.\n" for name in "ab"},
        **{f"steps/{name}/tests/test.sh": f"{ONE}echo secretword > /made\n" for name in "ab"},
        **{f"steps/{name}/solution/solve.sh": "echo secretword\n" for name in "ab"},
    }
    row = make_row(steps, config='[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n')
    async with episode(node, row) as one:
        await one.bash("(while true; do ls /tests > /app/seen 2> /dev/null && break; done) & disown")
        search = (
            "ls -d /made /tests/* /solution/*; grep -rls secretword / --exclude-dir=proc --exclude-dir=sys"
        )
        for _ in "ab":
            result = await one.bash(f"{search}; cat /app/seen; true")
            assert "secretword" not in result.text and "test.sh" not in result.text
            assert "\n/made" not in result.text
            await one.next_step()
        assert (await one.env.eval()).reward == 1


async def test_an_image_with_too_many_layers_is_refused_at_once(node: Node, make_row: MakeRow) -> None:
    lines = ["FROM base", *(f"COPY data.txt /srv/{number}" for number in range(119))]
    row = make_row({"environment/Dockerfile": "\n".join(lines) + "\n"})
    with pytest.raises(EnvironmentFault, match="has 120 layers; 120 are possible"):
        async with episode(node, row):
            pass
