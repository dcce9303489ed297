"""`prorl-envs envs` and `prorl-envs tasks`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.registry import environments
from tests.cli.conftest import SCRIPT, Cli, FastCli
from tests.cli.test_json import ROW, commands

SETTINGS = """\
environments:
  shell: {family: bash, agents: [codeact, mini-swe-agent]}
  gym: {nemo: {url: "http://127.0.0.1:9"}}
"""


def listed(fast_cli: FastCli, *arguments: str) -> dict[str, dict[str, Any]]:
    done = fast_cli("envs", "--json", *arguments)
    assert done.code == 0, done.err
    return {one["name"]: one for one in json.loads(done.out)}


def test_every_registered_family_is_listed(fast_cli: FastCli) -> None:
    found = listed(fast_cli)
    assert set(found) == set(environments())
    bash = found["bash"]
    assert (bash["kind"], bash["usable"], bash["problem"]) == ("built-in", True, "")
    assert bash["tasks"] == bash["runnable"] > 0 and bash["description"].startswith("Shell tasks")
    table = fast_cli("envs")
    assert all(name in table.out for name in found) and "12 of 12" in table.out


def test_environments_of_the_settings_are_listed(fast_cli: FastCli, tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    found = listed(fast_cli, "--config", "settings.yaml")
    assert set(found) == {"shell", "shell@codeact", "shell@mini-swe-agent", "gym"}
    assert (found["shell"]["kind"], found["shell"]["family"]) == ("built-in", "bash")
    assert (found["gym"]["kind"], found["gym"]["usable"], found["gym"]["tasks"]) == ("nemo-gym", None, None)
    assert "unknown" in fast_cli("envs", "--config", "settings.yaml").out


def test_missing_requirements_of_an_environment_are_listed(
    fast_cli: FastCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    harnessed = listed(fast_cli, "--config", "settings.yaml")["shell@mini-swe-agent"]
    assert harnessed["harness"] == "mini-swe-agent" and harnessed["usable"] is False
    assert "is not installed" in harnessed["problem"]
    row = {**ROW, "requires": ["no-such-program"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    table = fast_cli("tasks", "bash", "--data", "rows.jsonl")
    assert "no: " in table.out and "no-such-program" in table.out, table.err
    assert fast_cli("tasks", "bash", "--data", "rows.jsonl", "--runnable", "--json").out == ""


def test_a_package_that_cannot_be_imported_is_listed_with_its_problem(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "site" / "chess-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: chess\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[prorl_envs.environments]\nchess = no_such_chess:Chess\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    [chess] = [one for one in json.loads(cli("envs", "--json").stdout) if one["name"] == "chess"]
    assert (chess["kind"], chess["usable"]) == ("package", False)
    assert "no_such_chess" in chess["problem"]


def test_tasks_are_filtered_and_limited(fast_cli: FastCli) -> None:
    every = fast_cli("tasks", "bash")
    assert "greeting" in every.out and every.err == "12 of 12 tasks\n"
    first = fast_cli("tasks", "bash", "--limit", "2", "--json")
    assert len(first.out.splitlines()) == 2 and first.err == "2 of 12 tasks\n"
    by_instruction = fast_cli("tasks", "bash", "--filter", "hello, WORLD")
    assert "greeting" in by_instruction.out and by_instruction.err == "1 of 12 tasks\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("tasks", "Bsh"), "hint: did you mean bash?"),
        (("run", "swe-bench", "--llm", "http://127.0.0.1:9"), "hint: did you mean swebench?"),
        (("play", "zzz"), "hint: known: bash, code, ipython, math, stem, swebench, terminal"),
        (("play", "bash", "greting"), "hint: did you mean greeting?"),
        (("run", "bash", "--task", "greting"), "hint: did you mean greeting?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_name_gets_a_suggestion(fast_cli: FastCli, arguments: tuple[str, ...], hint: str) -> None:
    done = fast_cli(*arguments)
    assert done.code == 2 and hint in done.err, done.err


def test_help_names_the_built_in_environments() -> None:
    shown = [
        (name, one.help)
        for name, command in commands()
        for one in command.params
        if one.name == "environment"
    ]
    assert {name for name, _ in shown} >= {
        "run",
        "play",
        "validate",
        "prepare",
        "scripted-model",
        "tasks",
        "nemo rows",
    }
    for name, text in shown:
        assert all(family in text for family in environments()), name


def test_the_shell_completes_environments(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SETTINGS)
    words = {"COMP_WORDS": "prorl-envs run --config s.yaml shell@", "COMP_CWORD": "4"}
    done = subprocess.run(
        [SCRIPT],
        cwd=tmp_path, env={**os.environ, "_PRORL_ENVS_COMPLETE": "complete_bash", **words},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["shell@codeact", "shell@mini-swe-agent"], done.stderr
