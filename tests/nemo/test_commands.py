"""`prorl-envs nemo ...`"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from prorl_envs.cli.commands.nemo import nemo
from prorl_envs.env.registry import example_path
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import render


def test_rows_are_written(tmp_path: Path) -> None:
    target = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(nemo, ["rows", "bash", str(example_path("bash")), str(target)])
    assert done.exit_code == 0, done.output
    assert target.read_text() == render("bash", example_path("bash"))


def test_the_example_rows_are_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(nemo, ["examples", "bash", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "data" / "example.jsonl").read_text().splitlines()
    assert written == render("bash", example_path("bash")).splitlines()[:5]


def test_the_root_is_made_and_only_its_flags_are_printed(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "activate"):
        (venv / "bin" / name).touch()
    done = CliRunner().invoke(nemo, ["gym-root", str(tmp_path / "root"), "--venv", str(venv)])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [
        "+skip_venv_if_present=true",
        f"+uv_venv_dir={tmp_path / 'root' / 'venvs'}",
    ]


def test_an_unknown_family_is_an_input_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(nemo, ["rows", "nothing", str(tmp_path), str(tmp_path / "rows.jsonl")])
    assert isinstance(done.exception, InputError)


@pytest.mark.parametrize("command", ["rows", "examples", "gym-root"])
def test_each_command_has_help(command: str) -> None:
    assert CliRunner().invoke(nemo, [command, "--help"]).exit_code == 0
