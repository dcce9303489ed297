"""A user's mistake is reported before any work, as one sentence and a hint, without a traceback."""

import socket
from pathlib import Path

import pytest

from prorl_envs.app.compose import Model
from prorl_envs.errors import UnsupportedMachine
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.cli.conftest import Cli, FastCli


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
        (("validate", "bash", "file"), "file is empty"),
        (("play", "bash", "--data", "file"), "file is empty"),
        (("run", "bash", "--data", "file", "--llm", "http://127.0.0.1:9"), "file is empty"),
        (("run", "bash", "--data", "folder"), "folder is the folder of a run, not task rows"),
        (("demo", "--config", "wrong.yaml"), "wrong.yaml: setting service.init: "),
        (("show", "binary"), "binary is a binary file, not results"),
        (("view", "binary"), "binary is a binary file, not results"),
        (("compare", "binary", "file"), "binary is a binary file, not results"),
        (("demo", "--config", "none.yaml"), "none.yaml: cannot be read"),
        (("serve", "--llm", "nonsense"), "not the URL of a model server"),
        (("serve", "--llm", "http://a/v1", "--store", "~x/s.db"), "~x/s.db: ~x has no home directory"),
        (("demo", "--config", "homeless.yaml"), "~x/y: ~x has no home directory"),
        (("image", "build", "~x"), "~x: ~x has no home directory"),
        (
            ("image", "build", "folder", "--file", "folder/Dockerfile", "--base", "a=~x/b"),
            "~x/b: ~x has no home directory",
        ),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_clear_error(
    fast_cli: FastCli, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF\x02\x01\x01\x00")
    (tmp_path / "homeless.yaml").write_text("cache_dir: ~x/y")
    (tmp_path / "wrong.yaml").write_text("service: {init: 0}")
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    (tmp_path / "folder" / "Dockerfile").write_text("FROM a")
    row = '{"id": "a", "instruction": "b", "checks": [{"type": "file_absent", "path": "x"}]}'
    (tmp_path / "row.jsonl").write_text(row)
    done = fast_cli(*arguments)
    assert done.code == 2, done.err
    assert words in done.err and done.err.count("error: ") == 1
    assert "Traceback" not in done.err and "submitting" not in done.out


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("--port", "{used}"), "{}", "cannot listen on 127.0.0.1:{used}"),
        (("--port", "70000"), "{}", "--port"),
        (("--host", "0.0.0.0"), "{}", "so a token is needed"),
        (("--store", "file/store.db"), "{}", "file/store.db cannot be opened"),
        ((), "environments: {bsh: {}}", "no environment is called 'bsh'"),
        ((), "environments: {bash: {limits: {max_turns: 0}}}", "environments.bash.limits.max_turns"),
        ((), "service: {init: 0}", "setting service.init"),
    ],
)
def test_serve_checks_its_own_settings_before_it_asks_a_model_server(
    fast_cli: FastCli, tmp_path: Path, arguments: tuple[str, ...], settings: str, words: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "settings.yaml").write_text(settings)
    with socket.create_server(("127.0.0.1", 0)) as used, socket.create_server(("127.0.0.1", 0)) as model:
        port, url = used.getsockname()[1], f"http://127.0.0.1:{model.getsockname()[1]}"
        given = [argument.format(used=port) for argument in arguments]
        free = [] if "--port" in given else ["--port", "0"]
        done = fast_cli("serve", "--llm", url, "--config", "settings.yaml", *free, *given)
        assert done.code == 2 and words.format(used=port) in done.err, done.err
        model.settimeout(0)
        with pytest.raises(BlockingIOError):
            model.accept()


def test_serve_makes_no_store_on_a_machine_without_sandboxes(
    fast_cli: FastCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_works(*_: object, **__: object) -> str:
        raise UnsupportedMachine("this machine cannot start sandboxes: it is too small")

    monkeypatch.setattr("prorl_envs.app.compose.choose_driver", none_works)
    done = fast_cli("serve", "--llm", "http://127.0.0.1:9", "--port", "0")
    assert done.code == 2 and "it is too small" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [("demo", "--swebench", "0"), ("run", "bash", "--llm", "http://127.0.0.1:9", "--tokenizer", "x")],
)
def test_a_machine_without_sandboxes_gets_no_run(
    fast_cli: FastCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def none_works(*_: object, **__: object) -> str:
        raise UnsupportedMachine("this machine cannot start sandboxes: it is too small")

    async def connected(*_: object, **__: object) -> Model:
        return Model(servers=[], renderer=builtin_renderer())

    monkeypatch.setattr("prorl_envs.app.compose.choose_driver", none_works)
    monkeypatch.setattr("prorl_envs.cli.commands.run_episodes.connect", connected)
    done = fast_cli(*command)
    assert done.code == 2 and "it is too small" in done.err
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


@pytest.mark.parametrize("name", ["PRORL_RUN_DIR", "PRORL_CACHE_DIR"])
def test_serve_makes_no_store_if_its_node_cannot_start(
    fast_cli: FastCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "PRORL_RUN_DIR":
        monkeypatch.setenv(name, "/proc/none")
    else:
        monkeypatch.setattr("pathlib.Path.home", no_home)
        for variable in ("XDG_CACHE_HOME", name):
            monkeypatch.delenv(variable, raising=False)
    done = fast_cli("serve", "--llm", "http://127.0.0.1:9", "--port", "0")
    assert done.code == 2 and name in done.err, done.err
    assert not list(tmp_path.iterdir())


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_serve_tries_the_drivers_once(
    fast_cli: FastCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def choose(wanted: str, *_: object, **__: object) -> str:
        tried.append(wanted)
        return "bubblewrap"

    async def connected(*_: object, **__: object) -> Model:
        return Model(servers=[], renderer=builtin_renderer())

    async def ends(*_: object, **__: object) -> None:
        return

    monkeypatch.setattr("prorl_envs.app.compose.choose_driver", choose)
    monkeypatch.setattr("prorl_envs.app.compose.connect", connected)
    monkeypatch.setattr("prorl_envs.cli.commands.serve.serve_until_signal", ends)
    done = fast_cli("serve", "--llm", "http://127.0.0.1:9", "--port", "0", "--store", "memory")
    assert done.code == 0 and tried == ["auto"], done.err


def test_demo_checks_its_folder_before_it_asks_a_model_server(fast_cli: FastCli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "run.json").write_text("{}")
    for folder, words in (("file/runs", "cannot write file/runs"), ("done", "has the results of a run")):
        done = fast_cli("demo", "--out", folder, "--llm", "http://127.0.0.1:9")
        assert done.code == 2 and words in done.err and "left out" not in done.err, done.err


def test_brackets_are_not_markup(cli: Cli, tmp_path: Path) -> None:
    done = cli("show", "[bold]results[/bold] :smile:")
    assert "[bold]results[/bold] :smile:" in done.stderr


@pytest.mark.parametrize("command", [("doctor",), ("envs",), ("scripted-model", "bash")])
def test_a_user_without_a_home_gets_an_error(
    fast_cli: FastCli, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Kubernetes, the user often has no entry in /etc/passwd and no HOME."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "PRORL_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    done = fast_cli(*command)
    assert done.code == 2 and "this user has no home directory" in done.err and "set HOME" in done.err


def test_an_unwritable_cache_is_reported(cli: Cli, tmp_path: Path, config: Path) -> None:
    config.write_text("cache_dir: /proc/none\n")
    done = cli("scripted-model", "bash", "--config", str(config))
    assert done.returncode == 2 and "cannot be written" in done.stderr and "PRORL_CACHE_DIR" in done.stderr


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"
