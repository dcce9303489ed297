"""`prorl-envs serve` without a model server, for trainers that sample with their own engine."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from prorl_envs.rollout.api.interactive import EpisodeRequest
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.sync import SyncRolloutClient
from prorl_envs.testing.tokenizer import save_tokenizer
from tests.cli.conftest import SCRIPT, Cli, FastCli
from tests.cli.test_scripted import scripted
from tests.support.vllm_server import free_port

ROW = Path(__file__).parents[2] / "envs" / "bash" / "data" / "example.jsonl"


@contextmanager
def serving(
    folder: Path, *options: str, tokenizer: bool = True, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[tuple[str, str]]:
    """Run a service without a model server until the block ends; yield its URL and its output."""
    if not (folder / "tokenizer").exists():
        save_tokenizer(folder / "tokenizer")
    named = ["--tokenizer", str(folder / "tokenizer")] if tokenizer else []
    command = [str(SCRIPT), "serve", *named, "--port", "0", *options]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    place: Any = {"cwd": folder, "env": {**environ, "COLUMNS": "200"}}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **place)
    assert running.stderr is not None
    try:
        with running.stderr:
            said: list[str] = []
            while not said or "Ctrl-C" not in said[-1]:
                said.append(running.stderr.readline())
                assert said[-1], f"it ended: {said}"
            [url] = [line.split()[2] for line in said if line.startswith("rollout service:")]
            yield url, "".join(said)
    finally:
        running.send_signal(ended_by)
        ended = running.wait(60)
    assert ended == (0 if ended_by is signal.SIGTERM else -ended_by)


def test_serve_starts_without_a_model_server(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, said):
        assert "model server:    none yet" in said
        _used(url)


def test_a_killed_service_is_resumed(tmp_path: Path) -> None:
    task = json.loads(ROW.read_text().splitlines()[0])
    with serving(tmp_path, ended_by=signal.SIGKILL) as (url, said), SyncRolloutClient(url) as client:
        assert "store:           runs/service.db\n" in said
        client.submit([GroupRequest(id="g", environment="bash", task=task, samples=2)])
        ended = subprocess.run(
            [SCRIPT, "serve", "--tokenizer", "tokenizer"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 2 and "open in another service" in ended.stderr
    with serving(tmp_path) as (url, said), SyncRolloutClient(url) as client:
        assert "runs/service.db   (2 unfinished jobs resume)" in said
        assert len(client.group("g").jobs) == 2
        client.cancel_group("g")
        assert client.group("g").complete


def test_unfinished_jobs_wait_for_a_model_server_that_is_down(tmp_path: Path) -> None:
    """The restarted service takes the tokenizer from the store, because the model server does not answer."""
    task = json.loads(ROW.read_text().splitlines()[0])
    port = free_port()
    with serving(tmp_path, ended_by=signal.SIGKILL) as (url, _), SyncRolloutClient(url) as client:
        client.submit([GroupRequest(id="g", environment="bash", task=task)])
    down = f"http://127.0.0.1:{port}"
    with serving(tmp_path, "--llm", down, tokenizer=False) as (url, said), SyncRolloutClient(url) as client:
        assert "warning: " in said and down in said and "unfinished jobs wait" in said
        [server] = client.model_servers()
        assert server.url == down and server.state in ("unknown", "failing")
        with scripted(tmp_path, "bash", "--port", str(port)):
            group = client.group("g", wait_s=60)
            assert group.complete and group.statistics is not None
        assert client.result("g/0").reward == 1.0


def test_without_unfinished_jobs_a_model_server_that_is_down_is_an_error(cli: Cli, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    ended = cli(
        "serve", "--tokenizer", "tokenizer", "--llm", f"http://127.0.0.1:{free_port()}", "--port", "0"
    )
    assert ended.returncode == 2 and "cannot be reached" in ended.stderr


def test_a_store_in_memory_is_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, "--store", "memory") as (_, said):
        assert "store:           memory, lost at a restart" in said
    assert not (tmp_path / "runs").exists()


def _used(url: str) -> None:
    with SyncRolloutClient(url) as client:
        router = client.status().router
        assert router is not None and router.waiting and router.paused
        task = json.loads(ROW.read_text().splitlines()[0])
        episode = client.start_episode(EpisodeRequest(id="e", environment="bash", task=task))
        assert episode.prompt is not None and episode.prompt.ids, "whoever samples has what to sample from"
        client.close_episode("e")
        [down] = client.add_model_server("http://127.0.0.1:9")
        assert down.state == "failing" and "http://127.0.0.1:9" in down.problem
        router = client.status().router
        assert router is not None and router.waiting, "no server has answered yet"


def test_serve_without_a_tokenizer_names_the_missing_option(tmp_path: Path) -> None:
    ended = subprocess.run([SCRIPT, "serve"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no model server is named" in ended.stderr and "--tokenizer alone" in ended.stderr


def test_serve_without_a_writable_folder_names_the_remedy(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "runs").write_text("in the way")
    command = [str(SCRIPT), "serve", "--tokenizer", "tokenizer", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "runs/service.db cannot be opened" in ended.stderr and "--store" in ended.stderr


def test_the_token_and_a_login_link_are_printed(tmp_path: Path, fast_cli: FastCli) -> None:
    with serving(tmp_path, "--store", "memory") as (url, _):
        token = fast_cli("token", "--service", url).out.strip()
        link = fast_cli("dashboard", "--service", url).out.strip()
        with httpx.Client() as browser:
            assert browser.get(f"{url}/v1/status").status_code == 401
            named = {"Authorization": f"Bearer {token}"}
            assert browser.get(f"{url}/v1/status", headers=named).status_code == 200
            assert browser.get(link).is_redirect
            assert browser.get(f"{url}/v1/status").status_code == 200


@contextmanager
def on_a_terminal(folder: Path, *prefix: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a service on a terminal of its own; yield it and the other side of the terminal, to close."""
    save_tokenizer(folder / "tokenizer")
    master, slave = os.openpty()
    command = ["setsid", "-c", *prefix, str(SCRIPT), "serve", "--tokenizer", "tokenizer", "--port", "0"]
    service = subprocess.Popen(command, cwd=folder, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        yield service, master
        ended = service.wait(60)
    finally:
        service.kill()
        service.wait()
    assert ended == 0


def test_a_closed_terminal_stops_a_service_in_order(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path) as (_, terminal):
        said = b""
        while b"Ctrl-C" not in said:
            said += os.read(terminal, 4096)
        os.close(terminal)  # the kernel sends SIGHUP, and writes to the terminal fail


def test_a_closed_terminal_leaves_a_service_under_nohup(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "nohup") as (service, terminal):
        log = tmp_path / "nohup.out"
        while "Ctrl-C" not in (said := log.read_text() if log.exists() else ""):
            assert service.poll() is None, said
            time.sleep(0.05)
        os.close(terminal)
        [url] = [line.split()[2] for line in said.splitlines() if line.startswith("rollout service:")]
        assert httpx.get(f"{url}/health").status_code == 200
        service.terminate()
