"""`prorl-envs serve` before there is a model server: as a trainer wants it whose engine samples by itself."""

import json
import os
import signal
import subprocess
from pathlib import Path

from prorl_envs.rollout.episode_types import EpisodeRequest
from prorl_envs.rollout.sync_client import SyncRolloutClient
from prorl_envs.testing.tokenizer import save_tokenizer
from tests.cli.conftest import SCRIPT

ROW = Path(__file__).parents[2] / "envs" / "bash" / "data" / "example.jsonl"


def test_it_serves_without_a_model_server(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    command = [SCRIPT, "serve", "--tokenizer", str(tmp_path / "tokenizer"), "--port", "0"]
    options = {"cwd": tmp_path, "env": {**os.environ, "COLUMNS": "200"}}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    try:
        with running.stderr:
            said: list[str] = []
            while not said or "Ctrl-C" not in said[-1]:
                said.append(running.stderr.readline())
                assert said[-1], "it ended"
            assert "model server:    none yet" in "".join(said)
            _used(said[0].removeprefix("rollout service: ").split()[0])
    finally:
        running.send_signal(signal.SIGTERM)
        ended = running.wait(60)
    assert ended == 0


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
