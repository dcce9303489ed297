"""Grading of shell tasks against agents that try to cheat."""

from collections.abc import Sequence
from typing import Any

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.tools.types import ToolCall

GREETING: dict[str, Any] = {"type": "file_equals", "path": "greeting.txt", "text": "hello\n"}


async def play(node: Node, checks: Sequence[dict[str, Any]], *commands: str, **more: Any) -> Grade:
    """Run an episode: each command in the agent's shell, then the grade."""
    row = {"id": "t", "instruction": "Do it.", "checks": list(checks), **more}
    async with BashEnvironment(node) as env:
        await env.init(BashEnvironment.load(row))
        for command in commands:
            await env.call(ToolCall(id="c", name="bash", arguments={"command": command}), timeout_s=20)
        return await env.eval()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (GREETING, "echo hello > greeting.txt", "echo Hello > greeting.txt"),
        ({"type": "file_contains", "path": "a", "texts": ["x", "y"]}, "echo y.x > a", "echo x > a"),
        ({"type": "file_matches", "path": "a", "pattern": "^n=[0-9]+$"}, "echo n=42 > a", "echo n=4x > a"),
        ({"type": "file_json", "path": "a", "value": {"k": [1]}}, "echo '{\"k\": [1]}' > a", "echo '{' > a"),
        (
            {"type": "file_json", "path": "a", "value": [{"k": 1}]},
            "echo '[{\"k\": 1.0}]' > a",
            "echo '[{\"k\": true}]' > a",
        ),
        ({"type": "file_json", "path": "a", "value": False}, "echo false > a", "echo 0 > a"),
        ({"type": "file_absent", "path": "f"}, "rm f", "mv f g; ln -s nowhere f"),
        ({"type": "command", "command": "exit $(cat a)", "exit_code": 7}, "echo 7 > a", "echo 0 > a"),
        ({"type": "command", "command": "cat a; echo no >&2", "stdout": "1\n2\n"}, "seq 2 > a", "seq 3 > a"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
async def test_each_check_distinguishes_right_from_wrong(
    node: Node, check: dict[str, Any], right: str, wrong: str
) -> None:
    assert (await play(node, [check], right, files={"f": ""})).reward == 1.0
    assert (await play(node, [check], wrong, files={"f": ""})).reward == 0.0
    assert (await play(node, [check], files={"f": ""})).reward == 0.0


@pytest.mark.anyio
async def test_weighted_scoring_pays_the_passed_share(node: Node) -> None:
    other = {"type": "file_absent", "path": "f", "weight": 3, "name": "gone"}
    grade = await play(node, [GREETING, other], "rm f", files={"f": ""}, scoring="weighted")
    assert grade.reward == 0.75
    assert grade.components == {"1-file_equals": 0.0, "gone": 1.0}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("sort names.txt > sorted.txt", 1.0),
        ("echo x > sorted.txt", 0.25),  # the reward that the tests write, here a fraction
        (
            "mkdir -p /logs/verifier; ls /tests; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt",
            0.0,
        ),
        ("sort names.txt > sorted.txt; chmod -x tool.sh", 0.0),  # no reward is written
        ("ln -s /tests/right.txt sorted.txt", 0.0),
        ("ln -s ../tests a; ln -s a/right.txt sorted.txt", 0.0),
    ],
)
async def test_test_code_decides_and_is_copied_after_the_agent(
    node: Node, command: str, reward: float
) -> None:
    score = (
        "if cmp -s sorted.txt /tests/right.txt; then echo 1\n"
        "elif [ -s sorted.txt ]; then echo 0.25; else echo 0; fi\n"
    )
    check = {
        "type": "tests",
        "files": {"score.sh": score, "right.txt": "a\nb\nc\n"},
        "command": "[ -x tool.sh ] || exit 3; . /tests/score.sh > /logs/verifier/reward.txt",
        "reward": "/logs/verifier/reward.txt",
    }
    files = {"names.txt": "b\nc\na\n", "tool.sh": {"text": "#!/bin/sh\n", "executable": True}}
    grade = await play(node, [check], command, files=files, workdir="/app", scoring="weighted")
    assert grade.reward == reward, grade.evidence
    assert dict(grade.components) == {"1-tests": reward}


@pytest.mark.anyio
async def test_without_a_reward_file_the_exit_status_of_test_code_counts(node: Node) -> None:
    check = {"type": "tests", "files": {"t.sh": "[ -e a ]\n"}, "command": "sh /tests/t.sh"}
    assert (await play(node, [check], "touch a")).reward == 1.0
    assert (await play(node, [check], "true")).reward == 0.0


@pytest.mark.anyio
async def test_the_model_is_told_its_workspace_and_finds_no_tests(node: Node) -> None:
    check = {"type": "tests", "files": {"t.sh": "true\n"}, "command": "sh /tests/t.sh"}
    row = {"id": "t", "instruction": "Do it.", "checks": [check], "workdir": "/app"}
    async with BashEnvironment(node) as environment:
        prompt = await environment.init(BashEnvironment.load(row))
        assert "Work in /app:" in prompt.messages[0]["content"]
        assert "/workspace" not in prompt.messages[0]["content"]
        call = ToolCall(id="c", name="bash", arguments={"command": "pwd; ls / /app"})
        looked = await environment.call(call, timeout_s=20)
        assert looked.text.startswith("/app") and "tests" not in looked.text and "logs" not in looked.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    "cheat",
    [
        # programs that always succeed, first in the PATH of every shell the agent can reach
        "mkdir bin; for p in cat grep test '[' bash sh; do printf '#!/bin/sh\\nexit 0\\n' > bin/$p; done;"
        " chmod +x bin/*; export PATH=$PWD/bin:$PATH; cp -r bin ~",
        "echo 'exit 0' | tee .bashrc .bash_profile .profile ~/.bashrc ~/.profile; export BASH_ENV=~/.bashrc",
        "cat() { echo hello; }; export -f cat; alias cat='echo hello'",
        # the right content in the wrong place
        "echo hello > /tmp/greeting.txt; echo hello > ~/greeting.txt; ln -s /tmp/greeting.txt greeting.txt",
        # content from outside the copy
        "echo hello > other; ln -s /submission/other greeting.txt",
        "ln -s /proc/self/environ greeting.txt",
        "mkfifo greeting.txt; (while :; do echo hello > greeting.txt; done) &",
        "mkdir greeting.txt; echo hello > greeting.txt/greeting.txt",
        "rm -rf /workspace /workspace/* /workspace/.*",
        # endless and oversized trees
        "echo hello > greeting.txt; truncate -s 8G sparse",
        "echo hello > greeting.txt; mkdir secret; chmod 000 secret",
        "echo hello > greeting.txt; chmod 000 /workspace",
        "echo hello > greeting.txt; mkdir -p $(printf 'd/%.0s' {1..600})",
        "ln -s . loop; ln -s / root; ln -s greeting.txt greeting.txt",
        # the shell and all reachable processes killed
        "kill -9 $$",
        "kill -9 -1",
    ],
)
async def test_cheats_score_zero(node: Node, cheat: str) -> None:
    read = {"type": "command", "command": "cat greeting.txt", "stdout": "hello\n", "timeout_s": 2}
    assert (await play(node, [GREETING, read], cheat)).reward == 0.0


@pytest.mark.anyio
async def test_an_unreadable_file_does_not_count_as_removed(node: Node) -> None:
    check = {"type": "file_absent", "path": "secret/key"}
    grade = await play(node, [check], "chmod 000 secret", files={"secret/key": "k"})
    assert grade.reward == 0.0
    assert "secret" in grade.evidence["workspace"]


@pytest.mark.anyio
async def test_an_oversized_workspace_is_reported(node: Node) -> None:
    grade = await play(node, [GREETING], "truncate -s 1G big; echo hello > greeting.txt")
    assert grade.reward == 0.0
    assert "larger" in grade.evidence["workspace"]


@pytest.mark.anyio
async def test_checks_see_a_static_copy(node: Node) -> None:
    """A process that the agent leaves running neither changes the graded files nor outlives the sandbox."""
    beat = "(setsid sh -c 'n=0; while :; do n=$((n+1)); echo $n > beat; done' >/dev/null 2>&1 &)"
    still = 'a=$(cat beat) && for i in $(seq 20000); do :; done && [ "$a" = "$(cat beat)" ] && ls /submission'
    grade = await play(
        node,
        [{"type": "command", "command": still, "stdout": ""}],
        beat,
        "until [ -s beat ]; do :; done",
    )
    assert grade.reward == 1.0, grade.evidence


@pytest.mark.anyio
async def test_expected_output_is_not_visible_to_the_agents_program(node: Node) -> None:
    check = {"type": "command", "command": "./program", "stdout": "expected-4242\n"}
    places = "/proc/[0-9]*/cmdline /proc/[0-9]*/environ /tmp /run ~"
    spy = f"#!/bin/bash\ngrep -raohs 'expected-[0-9][0-9]*' {places} | head -n 1"
    grade = await play(node, [check], f"cat > program <<'END'\n{spy}\nEND\nchmod +x program")
    assert grade.reward == 0.0
    assert grade.evidence["checks"][0]["output"] == ""


@pytest.mark.anyio
async def test_a_program_that_kills_its_check_fails_it(node: Node) -> None:
    check = {"type": "command", "command": "./program; true"}
    program = "printf '#!/bin/sh\\nkill -9 $PPID\\nkill -9 -1\\n' > program; chmod +x program"
    assert (await play(node, [check], program)).reward == 0.0


@pytest.mark.anyio
async def test_processes_of_a_check_are_killed_before_the_next(node: Node) -> None:
    checks = [
        {"type": "command", "command": "./program"},
        {
            "type": "command",
            "command": "cat /proc/[0-9]*/cmdline | grep -ac '[s]tays-behind'; true",
            "stdout": "0\n",
        },
    ]
    program = "#!/bin/sh\nsetsid sh -c ': stays-behind; while :; do :; done' >/dev/null 2>&1 &"
    grade = await play(node, checks, f"cat > program <<'END'\n{program}\nEND\nchmod +x program")
    assert grade.reward == 1.0, grade.evidence


@pytest.mark.anyio
async def test_a_check_that_hangs_fails_at_its_deadline(node: Node) -> None:
    check = {"type": "command", "command": "./program", "timeout_s": 0.5}
    grade = await play(
        node, [check], "printf '#!/bin/sh\\nwhile :; do :; done\\n' > program; chmod +x program"
    )
    assert grade.reward == 0.0
    assert grade.evidence["checks"][0]["timed_out"]


@pytest.mark.anyio
async def test_modes_links_and_odd_names_survive_the_copy(node: Node) -> None:
    check = {
        "type": "command",
        "command": "stat -c '%a %F' 'odd\nname' link run && readlink link && cat 'odd\nname'",
        "stdout": "640 regular file\n777 symbolic link\n750 regular file\nrun\nx\n",
    }
    make = (
        'f=$\'odd\\nname\'; echo x > "$f"; chmod 640 "$f"; echo y > run; chmod 750 run;'
        " ln -s run link; mkfifo pipe"
    )
    grade = await play(node, [check], make)
    assert grade.reward == 1.0, grade.evidence


@pytest.mark.anyio
async def test_a_grader_that_cannot_run_is_an_error_without_a_reward(node: Node) -> None:
    with pytest.raises(GraderError, match="grep"):
        await play(node, [{"type": "file_matches", "path": "f", "pattern": "("}], files={"f": "x"})


@pytest.mark.anyio
async def test_a_failed_preparation_is_an_error(node: Node) -> None:
    with pytest.raises(EnvironmentFault, match=r"status 3.*no luck"):
        await play(node, [GREETING], setup="echo no luck; exit 3")
    with pytest.raises(EnvironmentFault, match="no such-program here"):
        await play(node, [GREETING], requires=["such-program"])


@pytest.mark.anyio
async def test_the_agent_finds_neither_checks_nor_reference(node: Node) -> None:
    """Only the files of the row are in the sandbox, and no installed copy of our data."""
    row = {
        "id": "t",
        "instruction": "Do it.",
        "checks": [{"type": "file_equals", "path": "a", "text": "needle-4242"}],
        "reference": [{"tool": "bash", "arguments": {"command": "echo needle-4242 > a"}}],
    }
    search = (
        "grep -rlsI 'needle-[0-9]' /workspace /home /tmp /run /etc /proc/[0-9]*/environ;"
        " find / -path '*envs/bash/data*' -not -path '/proc/*' 2>/dev/null; true"
    )
    async with BashEnvironment(node) as env:
        await env.init(BashEnvironment.load(row))
        result = await env.call(ToolCall(id="c", name="bash", arguments={"command": search}))
    assert result.text == ""
