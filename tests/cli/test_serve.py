"""`prorl-envs serve` before there is a model server: as a trainer wants it whose engine samples by itself."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prorl_envs.rollout.episode_types import EpisodeRequest
from prorl_envs.rollout.sync_client import SyncRolloutClient
from prorl_envs.rollout.types import GroupRequest
from prorl_envs.testing.tokenizer import save_tokenizer
from tests.cli.conftest import SCRIPT

ROW = Path(__file__).parents[2] / "envs" / "bash" / "data" / "example.jsonl"


@contextmanager
def serving(
    folder: Path, *options: str, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[tuple[str, str]]:
    """A service without a model server, until the block ends; its URL, and what it said of itself."""
    if not (folder / "tokenizer").exists():
        save_tokenizer(folder / "tokenizer")
    command = [str(SCRIPT), "serve", "--tokenizer", str(folder / "tokenizer"), "--port", "0", *options]
    place: Any = {"cwd": folder, "env": {**os.environ, "COLUMNS": "200"}}
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


def test_it_serves_without_a_model_server(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, said):
        assert "model server:    none yet" in said
        _used(url)


def test_it_goes_on_where_it_was_killed(tmp_path: Path) -> None:
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
        assert "runs/service.db   (2 unfinished jobs go on)" in said
        assert len(client.group("g").jobs) == 2
        client.cancel_group("g")
        assert client.group("g").complete


def test_what_is_in_memory_is_forgotten(tmp_path: Path) -> None:
    with serving(tmp_path, "--store", "memory") as (_, said):
        assert "store:           memory; a restart forgets" in said
    assert not (tmp_path / "runs").exists()


def _used(url: str) -> None:
    with SyncRolloutClient(url) as client:
        router = client.status().router
        assert router is not None and router.waiting and router.paused
        task = json.loads(ROW.read_text().splitlines()[0])
        episode = client.start_episode(EpisodeRequest(id="e", environment="bash", task=task))
        assert episode.prompt is not None and episode.prompt.ids, "whoever samples has what to sample from"
        client.close_episode("e")
        client.add_model_server("http://127.0.0.1:9")
        router = client.status().router
        assert router is not None and not router.waiting and not router.paused


def test_without_a_tokenizer_it_says_what_it_needs(tmp_path: Path) -> None:
    ended = subprocess.run([SCRIPT, "serve"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "no model server is named" in ended.stderr and "--tokenizer alone" in ended.stderr


def test_where_nothing_can_be_kept_it_says_what_to_do(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "runs").write_text("in the way")
    command = [str(SCRIPT), "serve", "--tokenizer", "tokenizer", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "runs/service.db cannot be opened" in ended.stderr and "--store" in ended.stderr
