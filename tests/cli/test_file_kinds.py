"""A file of the wrong kind is refused with its kind and the commands that read it."""

import gzip
import io
import json
import sqlite3
import tarfile
import zipfile
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_envs.env.file_kinds import FileKind, kind_of
from prorl_envs.env.registry import load_tasks
from prorl_envs.errors import WrongFileType
from tests.cli.conftest import FastCli
from tests.viewer.conftest import PICTURE, result, written

TASK = {"id": "a", "instruction": "Do.", "checks": [{"type": "file_absent", "path": "f"}]}


def _parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": ["a"], "instruction": ["Do."]}), path)


def _store(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")
    database.close()


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a"), io.BytesIO())


def _run(path: Path) -> None:
    path.mkdir()
    written(path / "results.jsonl", result())


MAKE: dict[FileKind, Callable[[Path], object]] = {
    FileKind.RESULTS: lambda path: written(path, result()),
    FileKind.STORE: _store,
    FileKind.TASKS: lambda path: path.write_text(json.dumps(TASK) + "\n"),
    FileKind.PARQUET: _parquet,
    FileKind.RUN: _run,
    FileKind.SETTINGS: lambda path: path.write_text("# mine\nservice:\n  run: 1\n"),
    FileKind.JSON: lambda path: path.write_text('{\n  "a": 1\n}\n'),
    FileKind.IMAGE: lambda path: path.write_bytes(b"#!/usr/bin/env x\n".ljust(32) + b"SIF_MAGIC\0"),
    FileKind.ARCHIVE: _zip,
    FileKind.PICTURE: lambda path: path.write_bytes(b64decode(PICTURE.partition(",")[2])),
    FileKind.PDF: lambda path: path.write_bytes(b"%PDF-1.7\n"),
    FileKind.HTML: lambda path: path.write_text("<!DOCTYPE html><title>x</title>"),
    FileKind.BINARY: lambda path: path.write_bytes(b"\x7fELF\x02\x01\x01\x00"),
    FileKind.TEXT: lambda path: path.write_text("Hello.\n"),
    FileKind.EMPTY: lambda path: path.write_text("\n"),
    FileKind.DIRECTORY: lambda path: path.mkdir(),
}  # fmt: skip
READ_AS_RESULTS = {FileKind.RESULTS, FileKind.RUN, FileKind.STORE}
READ_AS_ROWS = {FileKind.TASKS, FileKind.PARQUET}
#: Refused with the number and the problem of the first line.
BY_LINE = {FileKind.JSON, FileKind.TEXT}


@pytest.fixture
def make_file(tmp_path: Path) -> Callable[[FileKind], str]:
    def make(kind: FileKind) -> str:
        MAKE[kind](tmp_path / "given")
        return "given"

    return make


@pytest.mark.parametrize("kind", MAKE)
def test_the_kind_of_a_file(kind: FileKind, make_file: Callable[[FileKind], str], tmp_path: Path) -> None:
    assert kind_of(tmp_path / make_file(kind)) is kind


def test_every_kind_is_tested() -> None:
    assert set(MAKE) | {FileKind.RUN_PART} == set(FileKind)


def test_further_archives_and_parts_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"a"))
    _tar(tmp_path / "a.tar")
    assert {kind_of(tmp_path / name) for name in ("a.gz", "a.tar")} == {FileKind.ARCHIVE}
    _run(tmp_path / "run")
    (tmp_path / "run" / "groups.jsonl").write_text('{"id": "g", "task": {"instruction": "Do."}}\n')
    assert kind_of(tmp_path / "run" / "groups.jsonl") is FileKind.RUN_PART


@pytest.mark.parametrize("kind", sorted(set(MAKE) - READ_AS_RESULTS))
@pytest.mark.parametrize(
    "command", ["show given", "view given", "view given --html x.html", "compare given given", "replay given"]
)
def test_commands_that_read_results_refuse_other_kinds(
    command: str, kind: FileKind, make_file: Callable[[FileKind], str], fast_cli: FastCli
) -> None:
    make_file(kind)
    done = fast_cli(*command.split())
    assert done.code == 2 and done.err.count("error: ") == 1 and "hint: " in done.err, done.err
    if kind not in BY_LINE:
        assert f"given is {kind}" in done.err
    elif "replay" not in command:
        assert "given:1: not a rollout result" in done.err


@pytest.mark.parametrize("kind", sorted(set(MAKE) - READ_AS_ROWS))
def test_commands_that_read_task_rows_refuse_other_kinds(
    kind: FileKind, make_file: Callable[[FileKind], str], fast_cli: FastCli, tmp_path: Path
) -> None:
    path = make_file(kind)
    done = fast_cli("validate", "bash", path)
    assert done.code == 2 and done.err.count("error: ") == 1 and "hint: " in done.err, done.err
    if kind in BY_LINE:
        assert "given:1: line: not JSON" in done.err
    else:
        assert f"given is {kind}" in done.err
        with pytest.raises(WrongFileType):
            load_tasks("bash", tmp_path / path)


@pytest.mark.parametrize(
    ("kind", "command", "hint"),
    [
        (FileKind.TASKS, "show given", "`prorl-envs validate`"),
        (FileKind.RESULTS, "validate bash given", "`prorl-envs show`"),
        (FileKind.RUN, "validate bash given", "`prorl-envs show`"),
        (FileKind.STORE, "tasks bash --data given", "`prorl-envs show`"),
        (FileKind.IMAGE, "show given", "`prorl-envs image inspect`"),
        (FileKind.SETTINGS, "show given", "--config"),
    ],
)
def test_the_hint_names_the_commands_for_the_kind(
    kind: FileKind, command: str, hint: str, make_file: Callable[[FileKind], str], fast_cli: FastCli
) -> None:
    make_file(kind)
    assert hint in fast_cli(*command.split()).err


def test_a_run_without_results_is_not_a_wrong_file(fast_cli: FastCli, tmp_path: Path) -> None:
    _run(tmp_path / "run")
    (tmp_path / "run" / "results.jsonl").write_text("")
    (tmp_path / "run" / "run.json").write_text("{}")
    for source in ("run", "run/results.jsonl"):
        done = fast_cli("show", source)
        assert done.code == 2 and f"no result of {source}" in done.err


def test_one_bad_line_among_results_is_named(fast_cli: FastCli, tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", result())
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{}\n")
    done = fast_cli("show", "a.jsonl")
    assert done.code == 2 and "a.jsonl:2: " in done.err and "correct or remove the line" in done.err
