"""What a user can get wrong ends in one sentence and a hint: never in a traceback, never after the work."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("demo", "--swebench", "0", "--tasks", "1", "--out", "file/runs"),
            "cannot write file/runs/results.jsonl",
        ),
        (("demo", "--swebench", "0", "--tasks", "1", "--out", "folder"), "it is a folder"),
        (("nemo", "rows", "bash", "row.jsonl", "file/rows.jsonl"), "cannot write file/rows.jsonl"),
        (("nemo", "gym-root", "file/root"), "cannot write file/root"),
        (("validate", "bash", "file"), "no bash task"),
        (("play", "bash", "--data", "file"), "file holds no task"),
        (("run", "bash", "--data", "file", "--llm", "http://127.0.0.1:9"), "file holds no task"),
        (("run", "bash", "--data", "folder"), "Is a directory"),
        (("demo", "--config", "none.yaml"), "none.yaml: cannot be read"),
        (("serve", "--llm", "nonsense"), "not the URL of a model server"),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_clear_error(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    row = '{"id": "a", "instruction": "b", "checks": [{"type": "file_absent", "path": "x"}]}'
    (tmp_path / "row.jsonl").write_text(row)
    done = cli(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr and "submitting" not in done.stdout


def test_brackets_are_no_markup(cli: Cli, tmp_path: Path) -> None:
    done = cli("show", "[bold]results[/bold] :smile:")
    assert "[bold]results[/bold] :smile:" in done.stderr


def test_a_cache_that_cannot_be_written_is_found(cli: Cli, tmp_path: Path, config: Path) -> None:
    config.write_text("cache_dir: /proc/none\n")
    done = cli("scripted", "bash", "--config", str(config))
    assert done.returncode == 2 and "cannot be written" in done.stderr and "PRORL_CACHE_DIR" in done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"
