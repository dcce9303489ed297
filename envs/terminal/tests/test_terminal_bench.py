"""Task directories of Terminal-Bench 1: their settings, and an episode graded by the summary of pytest."""

from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.requirements import missing
from prorl_envs.errors import GraderError, InputError

from .test_env import episode, graded

FILES: dict[str, Any] = {
    "task.yaml": (
        "instruction: |-\n  Say hello.\nauthor_name: x\nparser_name: pytest\n"
        "max_agent_timeout_sec: 30.0\nmax_test_timeout_sec: 20.0\n"
    ),
    "Dockerfile": "FROM base\nWORKDIR /app\nCOPY . /app/\n",
    "docker-compose.yaml": (
        "services:\n  client:\n    build:\n      dockerfile: Dockerfile\n"
        "    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}\n"
        "    environment:\n      - TEST_DIR=${T_BENCH_TEST_DIR}\n      - MODE=quick\n"
    ),
    # The last lines of `pytest -rA`.
    "run-tests.sh": (
        "echo '=========== short test summary info ==========='\n"
        'if [ "$(cat /app/out.txt)" = hello ]; then echo "PASSED $TEST_DIR/test_outputs.py::test_a"; '
        'else echo "FAILED $TEST_DIR/test_outputs.py::test_a"; fi\n'
        "echo 'PASSED /tests/test_outputs.py::test_b'\n"
    ),
    "tests/test_outputs.py": "",
    "solution.sh": "echo hello > /app/out.txt\n",
}


def row(**files: Any) -> dict[str, Any]:
    changed = {**FILES, **{name.replace("__", "."): content for name, content in files.items()}}
    directory = {path: content for path, content in changed.items() if content is not None}
    return {"id": "say", "directory": directory}


def test_every_field_is_read() -> None:
    task = TerminalEnvironment.load(row())
    (step,) = task.steps
    assert task.instruction == "Say hello." and task.machine.folder == "."
    assert (step.agent.timeout_s, step.verifier.timeout_s) == (30, 20)
    assert task.machine.env == {"MODE": "quick"} and task.machine.services == ()
    assert step.tests == {"test_outputs.py": "tests/test_outputs.py", "run-tests.sh": "run-tests.sh"}
    assert missing(task, {}) == ()


@pytest.mark.anyio
async def test_the_summary_of_pytest_is_the_reward(node: Node) -> None:
    assert (await graded(node, row())).reward == 0
    async with episode(node, row()) as one:
        found = await one.bash("ls -1; echo $MODE")
        assert found.text == "Dockerfile\ndocker-compose.yaml\nrun-tests.sh\ntests\nquick\n"
        await one.solve()
        assert (await one.env.eval()).reward == 1


@pytest.mark.anyio
async def test_tests_without_a_summary_give_no_grade(node: Node) -> None:
    with pytest.raises(GraderError, match="no summary of pytest"):
        await graded(node, row(**{"run-tests.sh": "echo PASSED x\n"}))


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"task__yaml": "instruction: ["}, "task.yaml: "),
        ({"task__yaml": "author: x"}, "task.yaml: instruction: Field required"),
        ({"task__yaml": "instruction: x\nparser_name: other"}, "parser_name: 'other' is not supported"),
        ({"run-tests.sh": None}, "run-tests.sh: missing"),
        ({"docker-compose.yaml": "services: [a]"}, "docker-compose.yaml: services"),
        ({"docker-compose.yaml": "services: {client: {environment: 3}}"}, "services.client.environment"),
    ],
)
def test_a_wrong_task_names_the_file_and_the_field(files: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        TerminalEnvironment.load(row(**files))
