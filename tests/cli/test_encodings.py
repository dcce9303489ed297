"""Text of models and tasks on an output that cannot encode it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.cli.main import app
from tests.cli.conftest import SCRIPT
from tests.cli.test_commands import result, written

TEXT = "café ☃ 😀"
TASK = {"id": "t-é", "instruction": f"Say {TEXT}.", "checks": [{"type": "file_absent", "path": "ü"}]}
COMMANDS = (
    "show a.jsonl",
    "show b.jsonl",
    "compare a.jsonl b.jsonl",
    "tasks bash --data rows.jsonl",
    "validate bash --data rows.jsonl --driver é",
    "show é.jsonl",
    "show a.jsonl é/7",
    "export a.jsonl",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    said = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": f"{TEXT}\n" * 3}]
    for name in ("a", "b"):
        one = result(task_id="t-é", messages=said)
        written(tmp_path / f"{name}.jsonl", *[one] * (2 if name == "b" else 1))
    (tmp_path / "rows.jsonl").write_text(json.dumps(TASK, ensure_ascii=False) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, encoding: str, *arguments: str) -> tuple[str, str]:
    """Run a command in this process; return its two outputs."""
    streams = {}
    for name, errors in (("stdout", "strict"), ("stderr", "backslashreplace")):
        streams[name] = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
        monkeypatch.setattr(sys, name, streams[name])
    monkeypatch.setattr(sys, "argv", ["prorl-envs", *arguments])
    with pytest.raises(SystemExit):
        app()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams.values())
    return out, err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r", "utf-16"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_fails_on_a_character(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, encoding: str
) -> None:
    out, err = run(monkeypatch, encoding, *command.split())
    assert out or err
    assert "Traceback" not in err and "codec" not in out + err


def test_characters_are_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "caf? ? ?" in run(monkeypatch, "ascii", "show", "a.jsonl")[0]
    assert "café ? ?" in run(monkeypatch, "latin-1", "show", "a.jsonl")[0]
    assert TEXT in run(monkeypatch, "utf-8", "show", "a.jsonl")[0]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_loses_no_character(folder: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    out, _ = run(monkeypatch, encoding, "show", "a.jsonl", "--json")
    assert json.loads(out)["messages"][0]["content"] == TEXT
    assert (TEXT in out) == (encoding == "utf-8")


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii:xmlcharrefreplace"},
    ],
)
def test_the_environment_chooses_the_encoding(folder: Path, environ: dict[str, str]) -> None:
    done = subprocess.run(
        [SCRIPT, "show", "a.jsonl"], env=os.environ | environ, capture_output=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    expected = b"caf&#233;" if "xml" in str(environ) else b"caf? ? ?"
    assert expected in done.stdout


def test_rows_are_written_as_utf_8_in_every_locale(folder: Path) -> None:
    environ = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [str(SCRIPT), "nemo", "rows", "bash", "rows.jsonl", "made.jsonl"]
    done = subprocess.run(command, env=environ, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert TEXT in (folder / "made.jsonl").read_text(encoding="utf-8")
