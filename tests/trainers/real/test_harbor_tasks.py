"""Terminal tasks against the unmodified harbor package (0.26): both accept and refuse the same directories,
and read the same settings and rewards."""

import itertools
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.env.directories import directory_rows
from prorl_envs.envs.terminal.rows import task_of
from prorl_envs.envs.terminal.task import NetworkAccess, TerminalTask
from prorl_envs.envs.terminal.verifier import _parse_json, _parse_text
from prorl_envs.errors import InputError

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

_MODES = {"no-network": "none", "public": "public", "allowlist": "allowlist"}
#: Lines of each section; a variation takes some of each.
_LINES: Mapping[str, tuple[str, ...]] = {
    "environment": (
        "cpus = 2", "cpus = 1.5", "memory_mb = 512", 'memory = "2G"', 'memory = "512M"', 'storage = "1.5G"',
        'storage = "2000K"', "storage_mb = 100", "allow_internet = false", "allow_internet = true",
        'network_mode = "no-network"', 'network_mode = "allowlist"', 'allowed_hosts = ["a.org"]',
        "allowed_hosts = []", 'docker_image = "image:1"', 'workdir = "/w"', "build_timeout_sec = 5",
        "gpus = 1", 'env = {A = "${B:-1}"}', 'healthcheck = {command = "true", retries = 2}',
        "unknown = 1", 'cpus = "many"', 'memory = "much"', "memory = 5",
    ),
    "agent": ("timeout_sec = 7", 'user = "u"', "user = 5", 'network_mode = "public"', "extra = 1",
              'allowed_hosts = ["b.org"]'),
    "verifier": ("timeout_sec = 8", 'user = "v"', 'environment_mode = "separate"',
                 'environment_mode = "shared"', 'network_mode = "no-network"', 'env = {V = "1"}',
                 "environment = {cpus = 3}", 'environment = {docker_image = "v:1"}',
                 'collect = [{command = "c", user = 1}]', 'environment_mode = "other"'),
    "solution": ('env = {S = "1"}',),
    "metadata": ('difficulty = "hard"',),
}  # fmt: skip
_STEP = ("agent = {timeout_sec = 3}", "verifier = {timeout_sec = 4}", 'verifier = {env = {V = "2"}}',
         "min_reward = 0.5", "min_reward = {a = 1.0}", 'artifacts = ["/x"]',
         'verifier = {environment_mode = "separate"}', 'healthcheck = {command = "s"}')  # fmt: skip
_TOP = ('artifacts = ["/a"]', 'artifacts = [{source = "/b", exclude = ["*.o"]}]', 'version = "1.0"',
        'multi_step_reward_strategy = "final"', 'artifacts = ["/a/../b"]',
        'artifacts = [{source = "b", service = "db"}]')  # fmt: skip
#: Lines that are wrong, alone or beside most others; most variations have none of them.
_WRONG = (
    'cpus = "many"', 'memory = "much"', 'environment_mode = "other"', 'artifacts = ["/a/../b"]',
    'artifacts = [{source = "b", service = "db"}]', 'allowed_hosts = ["a.org"]', 'allowed_hosts = ["b.org"]',
)  # fmt: skip


def _variation(seed: int) -> str:
    choose = random.Random(seed)

    def random_lines(lines: tuple[str, ...], most: int) -> list[str]:
        picked = choose.sample(lines, min(len(lines), choose.randint(0, most)))
        return list({line.partition(" =")[0]: line for line in picked}.values())

    parts = random_lines(_TOP, 2)
    for section, lines in _LINES.items():
        parts += [f"[{section}]", *random_lines(lines, 4)]
    if choose.random() < 0.4:
        for name in choose.choice((("one",), ("one", "two"), ("one", "ONE"), ("a/b",))):
            parts += ["[[steps]]", f'name = "{name}"', *random_lines(_STEP, 2)]
    text = "\n".join(parts) + "\n"
    if choose.random() < 0.8:
        text = "".join(line for line in text.splitlines(keepends=True) if line.strip() not in _WRONG)
    return text


def _write(folder: Path, config: str, *, tests_image: bool) -> Path:
    files = {
        "task.toml": config,
        "instruction.md": "<!-- canary -->\n\nDo it.\n",
        "environment/Dockerfile": "FROM a\n",
        "tests/test.sh": "true\n",
        **{f"steps/{name}/instruction.md": f"Do {name}.\n" for name in ("one", "two")},
    }
    if tests_image:
        files["tests/Dockerfile"] = "FROM b\n"
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def _ours(folder: Path) -> TerminalTask | None:
    try:
        return task_of(next(row for _, row in directory_rows(folder)))
    except InputError:
        return None


def _theirs(folder: Path) -> Any:
    from harbor.models.task.task import Task

    try:
        return Task(folder)
    except (ValueError, FileNotFoundError):
        return None


def _machine(config: Any) -> dict[str, Any]:
    return {
        "image": config.docker_image or "",
        "build_s": config.build_timeout_sec,
        "cpus": config.cpus,
        "memory_bytes": config.memory_mb and config.memory_mb * 2**20,
        "disk_bytes": config.storage_mb and config.storage_mb * 2**20,
        "gpus": config.gpus or 0,
        "os": config.os.value,
        "network": NetworkAccess(
            mode=_MODES[config.network_mode.value],  # type: ignore[arg-type]
            hosts=tuple(config.allowed_hosts or ()),
        ),
        "env": config.env,
        "workdir": config.workdir or "",
    }


def _settings(task: Any) -> list[dict[str, Any]]:
    """Return the settings that harbor reads, in our terms: settings of the machine, then of each step."""
    from harbor.models.task.verifier_mode import resolve_verifier_environment_definition

    config, found = task.config, [_machine(task.config.environment)]
    for step in config.steps or [None]:
        definition = resolve_verifier_environment_definition(config, task.paths, step)
        agent, own = (step.agent, step.verifier) if step else (config.agent, config.verifier)
        artifacts = [*config.artifacts, *(step.artifacts if step else ())]
        found.append({
            "instruction": task.step_instruction(step.name) if step else task.instruction,
            "agent_s": config.agent.timeout_sec if agent.timeout_sec is None else agent.timeout_sec,
            "env": {**config.verifier.env, **own.env},
            "solution_env": config.solution.env,
            "artifacts": [one if isinstance(one, str) else one.source for one in artifacts],
            "bundled": definition is not None and definition.bundled_tests,
            "machine": None if definition is None else _machine(definition.config),
        })  # fmt: skip
    return found


def _own_settings(task: TerminalTask) -> list[dict[str, Any]]:
    names = _machine_names()
    found: list[dict[str, Any]] = [{name: getattr(task.machine, name) for name in names}]
    for step in task.steps:
        machine = step.verifier_machine
        found.append({
            "instruction": step.instruction,
            "agent_s": step.agent.timeout_s,
            "env": step.verifier.env,
            "solution_env": step.solution_env,
            "artifacts": [one.source for one in step.artifacts],
            "bundled": not step.tests,
            "machine": None if machine is None else {name: getattr(machine, name) for name in names},
        })  # fmt: skip
    return found


def _machine_names() -> tuple[str, ...]:
    return (
        "image",
        "build_s",
        "cpus",
        "memory_bytes",
        "disk_bytes",
        "gpus",
        "os",
        "network",
        "env",
        "workdir",
    )


@pytest.mark.parametrize(("first", "tests_image"), list(itertools.product(range(0, 200, 50), (False, True))))
def test_variations_are_read_alike(tmp_path: Path, first: int, tests_image: bool) -> None:
    for seed in range(first, first + 50):
        config = _variation(seed)
        folder = _write(tmp_path / str(seed), config, tests_image=tests_image)
        ours, theirs = _ours(folder), _theirs(folder)
        assert (ours is None) == (theirs is None), config
        if ours is not None:
            assert _own_settings(ours) == _settings(theirs), config


def test_the_template_is_read_alike(tmp_path: Path) -> None:
    import harbor

    folder = tmp_path / "task"
    shutil.copytree(Path(harbor.__path__[0]) / "cli" / "template-task", folder)
    assert _ours(folder) is None  # its instruction is empty, for the author to fill in
    (folder / "instruction.md").write_text("Do it.\n")
    ours, theirs = _ours(folder), _theirs(folder)
    assert ours is not None and _own_settings(ours) == _settings(theirs)


def _read_by_harbor(path: Path) -> Any:
    from harbor.models.verifier.result import VerifierResult
    from harbor.verifier.verifier import RewardFileEmptyError, Verifier, VerifierOutputParseError

    reader = SimpleNamespace(trial_paths=SimpleNamespace(reward_json_path=path, reward_text_path=path))
    parse = Verifier._parse_reward_json if path.suffix == ".json" else Verifier._parse_reward_text
    try:
        return VerifierResult(rewards=parse(reader)).rewards
    except (RewardFileEmptyError, VerifierOutputParseError, ValueError):
        return None


def _read_here(path: Path) -> Any:
    try:
        return (_parse_json if path.suffix == ".json" else _parse_text)(path.read_text()) or None
    except ValueError:
        return None


@pytest.mark.parametrize(
    "text",
    ["1", "0.5\n", " 1e-3 ", "nan", "inf", "-1", "", "one", "1 2", "0x1", "1_0", "True"],
)
def test_numbers_are_read_alike(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reward.txt"
    path.write_text(text)
    assert _read_here(path) == _read_by_harbor(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"reward": 1}', '{"a": 0.5, "b": 1}', '{"a": true}', '{"a": "1"}', '{"a": null}', '{"a": NaN}',
        '{"a": [1]}', '{"a": 1e999}', "[1]", '"1"', "null", "{", "",
    ],
)  # fmt: skip
def test_objects_are_read_alike(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reward.json"
    path.write_text(text)
    assert _read_here(path) == _read_by_harbor(path)
