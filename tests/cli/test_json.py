"""With `--json`, every command writes only JSON to standard output."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup

from prorl_envs.rollout.api.types import Result
from tests.cli.conftest import Cli, Done, FastCli
from tests.cli.test_scripted import scripted
from tests.cli.test_steer import Steered
from tests.docs.blocks import ROOT
from tests.test_docs import program
from tests.viewer.conftest import result, written

ROW = {
    "id": "a",
    "instruction": "Remove f.",
    "files": {"f": "x"},
    "checks": [{"type": "file_absent", "path": "f"}],
    "reference": [{"tool": "bash", "arguments": {"command": "rm f"}}],
}
#: Commands without `--json`, with the reason.
WITHOUT = {
    "nothing: they write files or change something": {
        "export", "harness install", "image prune", "nemo examples", "nemo rows", "new",
    },
    "statistics, which are in summary.json of the run's folder": {"demo", "run"},
    "until they are interrupted": {"play", "scripted-model", "serve", "view"},
    "one value": {"dashboard", "image build", "image pull", "nemo gym-root", "token"},
    "JSON in any case": {"image inspect"},
}  # fmt: skip
#: Arguments and exit status of each command with `--json`. The service has a finished job `g/0` and an
#: unfinished one, `g/1`.
OFFLINE = {
    "compare a.jsonl b.jsonl": 0,
    "audit bash rows.jsonl": 0,
    "conformance --driver local --only START-004": 0,
    "envs": 0,
    "harness list": 0,
    "image list": 0,
    "prepare bash rows.jsonl": 0,
    "replay a.jsonl": 1,
    "settings": 0,
    "show a.jsonl": 0,
    "tasks bash": 0,
    "validate bash rows.jsonl": 0,
}
#: Covered by another test.
ELSEWHERE = {"check-llm", "doctor"}
#: Commands that start sandboxes.
SLOW = {"audit", "conformance", "prepare", "replay", "validate"}
ON_A_SERVICE = {
    "acknowledge g": 0,
    "cancel g/1": 0,
    "drain": 0,
    "jobs": 0,
    "limits": 0,
    "nodes drain gpu17": 2,
    "nodes list": 0,
    "nodes resume gpu17": 2,
    "pause": 0,
    "resume": 0,
    "retry g/0": 0,
    "servers add http://127.0.0.1:8001/v1": 0,
    "servers drain http://127.0.0.1:8001": 0,
    "servers list": 0,
    "status": 0,
}


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command of the program with its full name."""
    for name, command in (group or program()).commands.items():
        words = f"{path} {name}".strip()
        if isinstance(command, TyperGroup):
            yield from commands(command, words)
        else:
            yield words, command


def json_option(command: Any) -> Any:
    return next((one for one in command.params if "--json" in one.opts), None)


def called(line: str) -> str:
    """Return the full name of the command in a command line."""
    [name] = [name for name, _ in commands() if line == name or line.startswith(f"{name} ")]
    return name


def test_every_command_has_the_json_option_or_no_parsable_output() -> None:
    options = {name: json_option(command) for name, command in commands()}
    having = {name for name, option in options.items() if option is not None}
    assert having == {called(line) for line in (*OFFLINE, *ON_A_SERVICE)} | ELSEWHERE
    assert set(options) - having == set().union(*WITHOUT.values())
    assert all(options[name].is_flag for name in having)
    assert {options[name].help for name in having} == {"Print JSON, and nothing else, to standard output."}


def parsed(text: str) -> list[Any]:
    """Parse an output that is one document, or one document per line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    for name, reward in (("a", 1.0), ("b", 0.0)):
        results: list[Result] = [result("g/0", reward=reward), result("g/1", reward=reward)]
        written(tmp_path / f"{name}.jsonl", *results)
    return tmp_path


@pytest.mark.parametrize("line", OFFLINE)
def test_standard_output_is_json(cli: Cli, fast_cli: FastCli, folder: Path, line: str) -> None:
    if called(line) in SLOW:
        ended = cli(*line.split(), "--json")
        done = Done(ended.returncode, ended.stdout, ended.stderr)
    else:
        done = fast_cli(*line.split(), "--json")
    assert done.code == OFFLINE[line], done.err
    assert parsed(done.out), "nothing was printed"


def test_standard_output_of_a_service_is_json(fast_cli: FastCli) -> None:
    steered = Steered()
    try:
        steered.submit("g", 2)
        assert fast_cli("cancel", "g/0", "--service", steered.url).code == 0
        for line, code in ON_A_SERVICE.items():
            done = fast_cli(*line.split(), "--json", "--service", steered.url)
            assert done.code == code, f"{line}: {done.err}"
            assert code or len(parsed(done.out)) == 1, f"{line}: {done.out}"
            assert not code or not done.out, f"{line}: an error goes to standard error alone"
    finally:
        steered.end()


def test_findings_of_a_model_server_are_json(cli: Cli, tmp_path: Path) -> None:
    with scripted(tmp_path, "bash", "--data", str(ROOT / "envs/bash/data/example.jsonl")) as (_, options):
        done = cli("check-llm", options[1], "--json")
    [findings] = parsed(done.stdout)
    assert done.returncode == 0 and {one["state"] for one in findings} <= {"kept", "absent"}, done.stderr


def test_several_results_are_one_line_each(fast_cli: FastCli, folder: Path) -> None:
    several = fast_cli("show", "a.jsonl", "--json").out.splitlines()
    assert [json.loads(line)["job_id"] for line in several] == ["g/0", "g/1"]
    [one] = fast_cli("show", "a.jsonl", "/1", "--json").out.splitlines()
    assert json.loads(one)["messages"]


def test_rows_that_were_listed_are_a_data_file(fast_cli: FastCli, folder: Path) -> None:
    listed = fast_cli("tasks", "bash", "--json", "--filter", "GREET")
    (folder / "chosen.jsonl").write_text(listed.out)
    again = fast_cli("tasks", "bash", "--json", "--data", "chosen.jsonl")
    assert json.loads(listed.out)["id"] == "greeting" and again.out == listed.out
