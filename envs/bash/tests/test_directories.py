"""Task directories in the formats of Harbor and Terminal-Bench are read, played, graded, or refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.env.base import Grade, ReferenceCall
from prorl_envs.env.node import Node
from prorl_envs.env.rows import read_tasks
from prorl_envs.env.validate import play, validate
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.envs.bash.task import BashTask
from prorl_envs.errors import InputError

HARBOR = {
    "task.toml": 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20.0\n',
    "instruction.md": "Sort /app/data/names.txt into /app/sorted.txt.\n",
    "environment/Dockerfile": (
        "# a comment\nFROM ubuntu:24.04\nWORKDIR /app\nCOPY data /app/data\nCOPY tool.sh .\n"
        'RUN mkdir out && \\\n    chmod +x tool.sh\nCMD ["bash"]\n'
    ),
    "environment/data/names.txt": "b\nc\na\n",
    "environment/tool.sh": "#!/bin/sh\necho tool\n",
    "tests/test.sh": (
        "cd /app && [ -x tool.sh ] && [ -d out ] || exit 3\n. /tests/score.sh > /logs/verifier/reward.txt\n"
    ),
    "tests/score.sh": (
        "if cmp -s sorted.txt /tests/right.txt; then echo 1\n"
        "elif [ -s sorted.txt ]; then echo 0.25; else echo 0; fi\n"
    ),
    "tests/right.txt": "a\nb\nc\n",
    "solution/solve.sh": "#!/bin/bash\nsort data/names.txt > sorted.txt\n",
}
TERMINAL_BENCH = {
    "task.yaml": "instruction: |-\n  Write hello into /work/out/a.\nmax_test_timeout_sec: 20\n",
    "Dockerfile": "FROM x\nWORKDIR /work/out\n",
    "docker-compose.yaml": "services: {}\n",
    "run-tests.sh": "sh /tests/check.sh\n",
    "tests/check.sh": '[ "$(cat a)" = hello ]\n',
    "solution.sh": "echo hello > a\n",
}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read(path: Path) -> list[BashTask]:
    return read_tasks(BashEnvironment.load, path)


@pytest.mark.anyio
async def test_tasks_of_both_formats_discriminate(node: Node, tmp_path: Path) -> None:
    written(tmp_path / "sort-names", HARBOR)
    written(tmp_path / "say-hello", TERMINAL_BENCH)
    (tmp_path / "README.md").write_text("Not a task.")
    tasks = read(tmp_path)
    assert [(task.id, task.workdir) for task in tasks] == [("say-hello", "/work/out"), ("sort-names", "/app")]
    assert tasks[1].instruction == HARBOR["instruction.md"]
    verdicts = await validate(BashEnvironment, node, tasks)
    assert {verdict.task_id: verdict.problems for verdict in verdicts} == {"say-hello": (), "sort-names": ()}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("echo x > sorted.txt", 0.25),  # the reward that the tests write, here a fraction
        (
            "mkdir -p /logs/verifier; ls /tests; echo 1 > /logs/verifier/reward.txt; echo 1 > reward.txt",
            0.0,
        ),
        ("printf 'a\\nb\\nc\\n' > sorted.txt; chmod -x tool.sh", 0.0),  # no reward is written
        ("ln -s /tests/right.txt sorted.txt", 0.0),
        ("ln -s ../tests a; ln -s a/right.txt sorted.txt", 0.0),
    ],
)
async def test_the_tests_decide_and_are_copied_after_the_agent(
    node: Node, tmp_path: Path, command: str, reward: float
) -> None:
    (task,) = read(written(tmp_path / "t", HARBOR))
    grade = await played(node, task, command)
    assert grade.reward == reward, grade.evidence
    assert dict(grade.components) == {"1-tests": reward}


@pytest.mark.anyio
async def test_the_agent_is_shown_its_workspace_and_finds_no_tests(node: Node, tmp_path: Path) -> None:
    (task,) = read(written(tmp_path / "t", HARBOR))
    async with BashEnvironment(node) as environment:
        prompt = await environment.init(task)
        assert "Work in /app:" in prompt.messages[0]["content"]
        assert "/workspace" not in prompt.messages[0]["content"]
        looked = await environment._here("look").tools.bash("pwd; ls / /app; cat tool.sh", timeout_s=20)
        assert looked.text.startswith("/app") and "echo tool" in looked.text
        assert "tests" not in looked.text and "logs" not in looked.text and "solution" not in looked.text


async def played(node: Node, task: BashTask, command: str) -> Grade:
    call = ReferenceCall(tool="bash", arguments={"command": command})
    return (await play(BashEnvironment, node, task, [call]))[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"environment/Dockerfile": "FROM x\nRUN apt-get update\n"},
            "instruction 2 (RUN) installs something",
        ),
        ({"environment/Dockerfile": "FROM x\nFROM y AS z\nCOPY a b"}, "there is no a"),
        ({"environment/Dockerfile": "FROM x\nRUN true\nFROM w"}, "instruction 3 (FROM) is not supported"),
        ({"environment/Dockerfile": "ENV A=b"}, "(ENV) is not supported"),
        ({"environment/Dockerfile": "COPY --chown=x tool.sh ."}, "without options"),
        (
            {"environment/Dockerfile": "COPY tool.sh /usr/bin/"},
            "/usr/bin/tool.sh is outside the workspace /app",
        ),
        ({"environment/Dockerfile": "WORKDIR /usr/x"}, "'/usr/x' cannot be the workspace"),
        ({"task.toml": "= 1"}, "task.toml: "),
        ({"instruction.md": None}, "instruction.md: missing"),
        ({"tests/test.sh": None}, "tests/test.sh: missing"),
    ],
)
def test_tasks_with_unsupported_requirements_are_refused(
    tmp_path: Path, change: dict[str, str | None], says: str
) -> None:
    files = {name: text for name, text in {**HARBOR, **change}.items() if text is not None}
    with pytest.raises(InputError) as caught:
        read(written(tmp_path / "t", files))
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_links_and_oversized_files_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "t", HARBOR)
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="link: not a regular file"):
        read(folder)
    (folder / "tests" / "link").unlink()
    (folder / "tests" / "big").write_bytes(b"\0" * (9 << 20))
    with pytest.raises(InputError, match="more than"):
        read(folder)
