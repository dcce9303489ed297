"""Hostile task directories are refused quickly, by an InputError that names the file."""

from typing import Any

import pytest

from prorl_envs.envs.terminal.requirements import missing
from prorl_envs.envs.terminal.rows import task_of
from prorl_envs.errors import InputError

from .conftest import MakeRow
from .test_terminal_bench import row

_DIGITS = "9" * 5000
#: Nine aliases in nine levels: a few hundred bytes of YAML, but gigabytes as a text.
_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    "config",
    [
        f"[environment]\ncpus = {_DIGITS}\n",
        "[environment]\ncpus = -1\n",
        "[environment]\nmemory_mb = -1\n",
        f"[environment]\nmemory_mb = {'9' * 30}\n",
        '[environment]\nmemory = "1.2.3G"\n',
        f'[environment]\nmemory = "{"9" * 400}G"\n',
        '[environment]\nmemory = "1K"\n',
        "[environment]\nbuild_timeout_sec = nan\n",
        "[environment]\ngpus = -1\n",
        '[environment]\nworkdir = "/a\\u0000"\n',
        '[environment.env]\n"A=B" = "x"\n',
        '[environment.env]\nA = "\\u0000"\n',
        '[environment.healthcheck]\ncommand = "true"\nretries = -1\n',
        "[verifier]\ntimeout_sec = inf\n",
        "[verifier.env]\n'' = 'x'\n",
        "[agent]\ntimeout_sec = 0\n",
        '[[verifier.collect]]\ncommand = "\\u0000"\n',
        "x = " + "[" * 5000 + "]" * 5000 + "\n",
    ],
)
def test_a_hostile_task_toml_is_refused(make_row: MakeRow, config: str) -> None:
    with pytest.raises(InputError, match=r"^task\.toml: "):
        task_of(make_row(config=config))


@pytest.mark.parametrize(
    "value",
    [
        _DIGITS,
        "2024-13-45",
        '!!int ""',
        "!!bool x",
        "!!timestamp x",
        "!!float x",
        "!!python/none x",
        "[" * 3000,
    ],
)
def test_a_hostile_task_yaml_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=r"^task\.yaml: "):
        task_of(row(task__yaml=f"instruction: x\nother: {value}\n"))


@pytest.mark.parametrize(
    "client",
    [
        "{image: *a9}",
        "{environment: {A: *a9}}",
        "{environment: [*a9]}",
        "{environment: ['=x']}",
        '{environment: ["A=\\0"]}',
    ],
)
def test_a_hostile_compose_file_is_refused(client: str) -> None:
    with pytest.raises(InputError, match=r"^docker-compose\.yaml: services\.client"):
        task_of(row(**{"docker-compose.yaml": f"{_BOMB}services:\n  client: {client}\n"}))


def test_comments_that_mark_benchmark_data_are_not_shown(make_row: MakeRow) -> None:
    marked = "<!-- Canary 1 -->\n  # the CANARY 2\n\n \n  Do it.\n# canary 3\n"
    assert task_of(make_row({"instruction.md": marked})).instruction == "  Do it.\n# canary 3\n"
    with pytest.raises(InputError, match=r"instruction\.md: empty"):
        task_of(make_row({"instruction.md": "# canary\n"}))


@pytest.mark.parametrize(
    ("compose", "services"),
    [
        ("main: {build: .}, db: {image: x}", ("db",)),
        ("db: {image: x}, shell: {build: .}", ("db",)),
        ("client: {build: .}, main: {build: .}", ("main",)),
    ],
)
def test_the_own_service_is_found(compose: str, services: tuple[str, ...]) -> None:
    task = task_of(row(**{"docker-compose.yaml": f"services: {{{compose}}}\n"}))
    assert tuple(service.name for service in task.machine.services) == services


def test_a_missing_own_service_is_a_reason() -> None:
    task = task_of(row(**{"docker-compose.yaml": "services: {a: {build: .}, b: {build: .}}\n"}))
    assert missing(task, {}) == ("docker-compose.yaml: services: none is named client, the agent's own",)


@pytest.mark.parametrize("main", ["client", "main"])
def test_parts_of_the_host_are_reasons(make_row: MakeRow, main: str) -> None:
    text = f"services:\n  {main}:\n    privileged: true\n    devices: ['/dev/kvm:/dev/kvm']\n"
    given: dict[str, Any] = row(**{"docker-compose.yaml": text})
    if main == "main":
        given = make_row({"environment/docker-compose.yaml": text})
    assert missing(task_of(given), {}) == (
        "it needs the device /dev/kvm",
        "it needs a privileged container",
    )
