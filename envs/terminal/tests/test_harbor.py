"""Task directories of Harbor: all supported fields are read; errors name file and field."""

from typing import Any

import pytest

from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.rows import task_of
from prorl_envs.envs.terminal.task import Artifact, Collect, HealthCheck, NetworkAccess, TerminalTask
from prorl_envs.errors import InputError

from .conftest import MakeRow

CONFIG = """
artifacts = ["/a", {source = "/b", exclude = ["*.pyc"], service = "db"}]
[metadata]
difficulty = "hard"
[agent]
timeout_sec = 10
user = "somebody"
network_mode = "no-network"
[verifier]
timeout_sec = 20
[verifier.env]
A = "1"
[[verifier.collect]]
command = "dump"
service = "db"
timeout_sec = 5
[solution.env]
S = "2"
[environment]
build_timeout_sec = 30
docker_image = "registry/image:1"
cpus = 2
memory_mb = 512
storage_mb = 1024
gpus = 1
network_mode = "allowlist"
allowed_hosts = ["a.org", "*.b.org"]
workdir = "/w"
mcp_servers = [{name = "search", url = "http://x"}]
[environment.env]
E = "${E:-3}"
[environment.healthcheck]
command = "true"
retries = 7
"""


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_every_field_is_read(make_row: MakeRow, mark: str) -> None:
    row = make_row(config=CONFIG)
    for name in ("task.toml", "instruction.md"):
        row["directory"][name] = mark + row["directory"][name]
    task = task_of(row)
    machine, (step,) = task.machine, task.steps
    assert task.instruction == step.instruction == "Write hello to /app/out.txt.\n"
    assert (machine.folder, machine.image, machine.build_s) == ("environment", "registry/image:1", 30)
    assert (machine.cpus, machine.memory_bytes, machine.disk_bytes) == (2, 512 << 20, 1024 << 20)
    assert (machine.gpus, machine.tools, machine.workdir) == (1, ("search",), "/w")
    assert machine.network == NetworkAccess(mode="allowlist", hosts=("a.org", "*.b.org"))
    assert machine.env == {"E": "${E:-3}"}
    assert machine.health == HealthCheck(command="true", retries=7)
    assert (step.agent.timeout_s, step.agent.network) == (10, NetworkAccess())
    assert (step.verifier.timeout_s, step.verifier.env, step.verifier.network) == (20, {"A": "1"}, None)
    assert step.tests == {"test.sh": "tests/test.sh"} and step.test_script == "test.sh"
    assert step.solution == {"solve.sh": "solution/solve.sh"} and step.solution_env == {"S": "2"}
    assert step.artifacts == (Artifact(source="/a"), Artifact(source="/b", exclude=("*.pyc",), service="db"))
    assert task.collects == (Collect(command="dump", service="db", timeout_s=5),)


def test_defaults(make_row: MakeRow) -> None:
    task = task_of(make_row({"solution/solve.sh": None}))
    assert task.machine.network == NetworkAccess(mode="public")
    assert task.machine.build_s == 600 and task.machine.memory_bytes is None
    assert task.steps[0].agent.timeout_s is None and task.steps[0].verifier.timeout_s == 600
    assert task.steps[0].solution == {} and task.steps[0].verifier_machine is None


@pytest.mark.parametrize(
    ("config", "memory", "mode"),
    [
        ('memory = "2G"\nallow_internet = false', 2 << 30, "none"),
        ('memory = "512M"\nmemory_mb = 512\nallow_internet = true', 512 << 20, "public"),
        ('memory = "1024K"\nallow_internet = false\nnetwork_mode = "public"', 1 << 20, "public"),
    ],
)
def test_older_fields_are_read(make_row: MakeRow, config: str, memory: int, mode: str) -> None:
    machine = task_of(make_row(config=f"[environment]\n{config}\n")).machine
    assert machine.memory_bytes == memory and machine.network.mode == mode


def test_the_tests_folder_with_a_dockerfile_is_a_separate_verifier(make_row: MakeRow) -> None:
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    files = {"tests/Dockerfile": "FROM x\n", "tests/test.sh": None}
    step = task_of(make_row(files, config=separate)).steps[0]
    assert step.verifier_machine is not None and step.verifier_machine.folder == "tests" and step.tests == {}
    step = task_of(make_row(config=separate)).steps[0]
    assert step.verifier_machine is not None and step.verifier_machine.folder == "environment" and step.tests
    config = '[verifier.environment]\ndocker_image = "y"\nmemory_mb = 64\n'
    step = task_of(make_row(config=config)).steps[0]
    assert step.verifier_machine is not None and step.verifier_machine.image == "y" and step.tests == {}
    assert step.verifier_machine.memory_bytes == 64 << 20


def steps_task(make_row: MakeRow) -> TerminalTask:
    files = {
        "instruction.md": None,
        "tests/helper.sh": "shared",
        "steps/a/instruction.md": "A",
        "steps/b/instruction.md": "B",
        "steps/b/tests/test.sh": "own",
        "steps/b/tests/helper.sh": "own",
        "steps/b/workdir/x/y": "y",
    }
    config = (
        '[agent]\ntimeout_sec = 9\n[verifier]\ntimeout_sec = 8\n[verifier.env]\nA = "1"\nB = "1"\n'
        '[[steps]]\nname = "a"\nmin_reward = 0.5\n[[steps]]\nname = "b"\nmin_reward = {speed = 2}\n'
        '[steps.agent]\ntimeout_sec = 7\n[steps.verifier]\ntimeout_sec = 6\n[steps.verifier.env]\nB = "2"\n'
    )
    return task_of(make_row(files, config=config))


def test_steps_inherit_settings_of_the_task(make_row: MakeRow) -> None:
    a, b = steps_task(make_row).steps
    assert (a.name, a.instruction, b.name, b.instruction) == ("a", "A", "b", "B")
    assert (a.agent.timeout_s, b.agent.timeout_s) == (9, 7)
    assert (a.verifier.timeout_s, b.verifier.timeout_s) == (8, 6)
    assert a.verifier.env == {"A": "1", "B": "1"} and b.verifier.env == {"A": "1", "B": "2"}
    assert a.min_reward == {"reward": 0.5} and b.min_reward == {"speed": 2}
    assert a.tests == {"test.sh": "tests/test.sh", "helper.sh": "tests/helper.sh"}
    assert b.tests == {"test.sh": "steps/b/tests/test.sh", "helper.sh": "steps/b/tests/helper.sh"}
    assert b.workdir_files == {"x/y": "steps/b/workdir/x/y"}


@pytest.mark.parametrize(
    ("files", "config", "error"),
    [
        ({"task.toml": "a ="}, "", "task.toml: Invalid value"),
        ({"instruction.md": None}, "", "instruction.md: missing"),
        ({"instruction.md": " \n"}, "", "instruction.md: empty"),
        ({"instruction.md": {"base64": "AAA="}}, "", "instruction.md: not a text"),
        ({"tests/test.sh": None}, "", "tests/test.sh: missing"),
        ({}, '[environment]\ncpus = "many"\n', "task.toml: environment.cpus: .*number"),
        ({}, "[environment]\ncpus = inf\n", "task.toml: environment.cpus: .*finite"),
        ({}, '[environment]\nnetwork_mode = "some"\n', "task.toml: environment.network_mode: "),
        ({}, '[environment]\nallowed_hosts = ["a"]\n', "task.toml: environment: .*allowlist"),
        ({}, '[environment]\nmemory = "lots"\n', "environment.memory: not a size: 'lots'"),
        ({}, '[environment]\nmemory = "1G"\nmemory_mb = 1\n', "memory and memory_mb differ"),
        ({}, '[[steps]]\nname = "../a"\n', r"task.toml: steps.0.name: .*'\.\./a'"),
        ({}, '[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', "two steps have the same name"),
        ({}, '[[steps]]\nname = "a"\n', "steps/a/instruction.md: missing"),
        ({}, 'artifacts = ["/a/../b"]\n', r"task.toml: artifacts.0"),
        (
            {"environment/docker-compose.yaml": "services: 3\n"},
            "",
            "docker-compose.yaml: services: not a mapping",
        ),
        ({"environment/docker-compose.yaml": "a: [\n"}, "", "environment/docker-compose.yaml: "),
        (
            {},
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1\n',
            "task.toml: verifier: .*shared",
        ),
    ],
)
def test_a_wrong_task_names_the_file_and_the_field(
    make_row: MakeRow, files: dict[str, Any], config: str, error: str
) -> None:
    with pytest.raises(InputError, match=error):
        TerminalEnvironment.load(make_row(files, config=config))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"id": "a"}, "directory: Field required"),
        ({"id": "a", "directory": {}}, "neither task.toml nor task.yaml"),
        ({"id": "a", "directory": {"../x": "y"}}, "directory.*relative path"),
        ({"id": "a", "directory": {"/x": "y"}}, "directory.*relative path"),
        ({"id": "a", "directory": {"x": {"base64": "!"}}}, "directory.x"),
        ({"id": "a", "directory": {"x": "y"}, "more": 1}, "more: Extra inputs"),
    ],
)
def test_a_wrong_row_names_the_field(row: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError, match=error):
        TerminalEnvironment.load(row)
