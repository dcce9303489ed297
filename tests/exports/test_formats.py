"""Every format refuses results that it cannot represent, and existing targets."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.exports.formats import ExportFormat, export
from prorl_envs.exports.target import MARKER
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.result_files import located_results
from tests.viewer.conftest import result, written

FORMATS = pytest.mark.parametrize("format_", list(ExportFormat))
FOLDERS = (ExportFormat.HF, ExportFormat.ATIF)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(target: Path) -> dict[Path, bytes]:
    files = [target] if target.is_file() else target.rglob("*")
    return {path: path.read_bytes() for path in files if path.is_file()}


@pytest.mark.parametrize("format_", FOLDERS)
def test_an_export_that_cannot_be_renamed_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: ExportFormat
) -> None:
    source = written(tmp_path / "r.jsonl", result("g/0"))
    export(located_results(source), format_, tmp_path / "out")
    before = contents(tmp_path / "out")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InputError, match="cannot write"):
        export(located_results(source), format_, tmp_path / "out", force=True)
    assert names(tmp_path) == {"r.jsonl", "out"}
    assert contents(tmp_path / "out") == before


@FORMATS
def test_a_bad_line_is_named_and_the_earlier_export_stays(tmp_path: Path, format_: ExportFormat) -> None:
    source = written(tmp_path / "r.jsonl", result("g/0"), result("g/1"))
    export(located_results(source), format_, tmp_path / "out")
    before = contents(tmp_path / "out")
    source.write_text(source.read_text() + '\n{"job_id": 3}\n')
    with pytest.raises(InputError, match=r"r\.jsonl:4: not a rollout result: "):
        export(located_results(source), format_, tmp_path / "out", force=True)
    assert names(tmp_path) == {"r.jsonl", "out"}
    assert contents(tmp_path / "out") == before


@FORMATS
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, format_: ExportFormat) -> None:
    def interrupted() -> Iterator[tuple[str, Result]]:
        yield "r:1", result("g/0")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(interrupted(), format_, tmp_path / "out")
    assert not names(tmp_path)


@FORMATS
def test_an_existing_target_is_replaced_only_by_force(tmp_path: Path, format_: ExportFormat) -> None:
    source = written(tmp_path / "r.jsonl", result("g/0"))
    target = tmp_path / "out"
    export(located_results(source), format_, target)
    with pytest.raises(InputError, match="out exists"):
        export(located_results(source), format_, target)
    written(source, result("h/0"), result("h/1"))
    assert export(located_results(source), format_, target, force=True).rollouts == 2
    assert names(tmp_path) == {"r.jsonl", "out"}
    if format_ is ExportFormat.ATIF:
        assert names(target) == {MARKER, "h"}


@FORMATS
def test_other_folders_are_never_replaced(tmp_path: Path, format_: ExportFormat) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    problem = "was not written by an export" if format_ in FOLDERS else "it is a folder"
    with pytest.raises(InputError, match=problem):
        export([("r:1", result("g/0"))], format_, tmp_path / "mine", force=True)
    assert names(tmp_path) == {"mine"} and names(tmp_path / "mine") == {"thesis.tex"}


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(InputError, match="was not written by an export"):
        export([("r:1", result("g/0"))], ExportFormat.ATIF, tmp_path / "mine", force=True)


def results(kind: str) -> list[Result]:
    return {
        "messages": [result("g/0", messages=[{"role": "assistant", "tool_calls": [{"id": "c"}]}])],
        "twice": [result("g/0"), result("g/0")],
        "path": [result("g/0"), result("../x/0")],
        "absolute": [result("/tmp/x/0")],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "format_", "words"),
    [
        ("messages", ExportFormat.SFT, "r:1: messages: not in the chat format"),
        ("messages", ExportFormat.HF, "r:1: messages: not in the chat format"),
        ("messages", ExportFormat.ATIF, "r:1: messages: not in the chat format"),
        ("twice", ExportFormat.ATIF, "r:2: an earlier line has the job id g/0"),
        ("path", ExportFormat.ATIF, "r:2: job_id: "),
        ("absolute", ExportFormat.ATIF, "r:1: job_id: "),
    ],
)
def test_results_that_a_format_cannot_represent(
    tmp_path: Path, kind: str, format_: ExportFormat, words: str
) -> None:
    located = [(f"r:{number}", one) for number, one in enumerate(results(kind), start=1)]
    with pytest.raises(InputError, match=words):
        export(located, format_, tmp_path / "out")
    assert not names(tmp_path)
