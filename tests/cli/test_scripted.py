"""The command for the scripted model server, and a run that uses the server like a real one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.errors import FailureKind
from prorl_envs.rollout.client.result_files import read_results
from tests.cli.conftest import SCRIPT, Cli


@contextmanager
def scripted(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start the server; yield its process and the options that it prints for clients."""
    process = subprocess.Popen(
        [SCRIPT, "scripted-model", *arguments],
        cwd=folder,
        env={**os.environ, "PRORL_CACHE_DIR": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_run_with_the_scripted_server_has_the_scripted_rewards(cli: Cli, tmp_path: Path) -> None:
    mix = "solve=1,wrong=1,error500=1"
    with scripted(tmp_path, "bash", "--mix", mix) as (process, options):
        assert options[0] == "--llm" and options[2] == "--tokenizer"
        done = cli("run", "bash", *options, "--limit", "1", "--samples", "3", "--out", "runs")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    results = list(read_results(tmp_path / "runs" / "results.jsonl"))
    assert sorted(r.reward for r in results if r.reward is not None) == [0.0, 1.0]
    assert [r.failure.kind for r in results if r.failure] == [FailureKind.MODEL]
    assert "model in run x1: " in done.stderr and "because of the behaviour" in done.stderr
    assert process.returncode == 0 and " requests of 3 sessions" in said


def test_nemo_gym_can_use_the_scripted_server(tmp_path: Path) -> None:
    (task, *_) = load_tasks("bash", example_path("bash"))
    with scripted(tmp_path, "bash") as (_, options):
        body = {"model": "reference", "input": task.instruction}
        reply = httpx.post(f"{options[1]}/responses", json=body).raise_for_status().json()
    assert [item["name"] for item in reply["output"]] == [task.reference[0].tool]


def test_a_port_in_use_is_a_clear_error(cli: Cli, tmp_path: Path) -> None:
    with scripted(tmp_path, "ipython") as (_, options):
        port = options[1].removesuffix("/v1").rpartition(":")[2]
        done = cli("scripted-model", "ipython", "--port", port)
    assert done.returncode == 2 and port in done.stderr and "Address already in use" in done.stderr


def test_tasks_without_references_are_refused(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"id": "a", "instruction": "b", "checks": [{"type": "number", "value": 1}]}'
    )
    done = cli("scripted-model", "ipython", "--data", "t.jsonl")
    assert done.returncode == 2 and "t.jsonl: no task has a reference" in done.stderr
