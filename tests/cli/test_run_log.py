"""`prorl-envs run --log` with the real packages, offline. Their own readers read the logs."""

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.rollout.client.result_files import read_results
from tests.cli.conftest import SCRIPT, Cli
from tests.cli.test_scripted import scripted

#: The commands import W&B and MLflow, which takes long on a busy machine.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    mix = "solve=2,wrong=1,error500=1"
    with scripted(tmp_path_factory.mktemp("model"), "bash", "--mix", mix) as (_, options):
        yield options


@pytest.fixture(scope="module")
def logged(model: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was logged by all loggers at once."""
    folder = tmp_path_factory.mktemp("logged")
    logs = ("tensorboard", "wandb:project=lab,mode=offline", "mlflow:tracking_uri=sqlite:///ml.db")
    options = [word for log in logs for word in ("--log", log)]
    done = subprocess.run(
        [SCRIPT, "run", "bash", *model, "--limit", "2", "--samples", "4", "--out", "out", *options],
        cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0 and "--log" not in done.stderr, done.stderr
    assert "wandb" not in done.stdout + done.stderr.replace(str(folder), ""), "W&B writes to the terminal"
    return folder


@pytest.fixture
def summary(logged: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((logged / "out" / "summary.json").read_text())
    return found


def check(last: dict[str, float], steps: set[int], summary: dict[str, Any]) -> None:
    """Check that the last values equal `summary.json`, and that each result is a step."""
    overall = summary["overall"]
    assert last["mean_reward"] == pytest.approx(overall["mean_reward"], rel=1e-6)
    assert last["environments/bash/mean_reward"] == last["mean_reward"]
    assert last["pass_at/1"] == pytest.approx(overall["pass_at"]["1"], rel=1e-6)
    assert last["failures/model"] == overall["failures"]["model"] == 2
    assert (last["results"], last["tokens"]) == (overall["results"], overall["tokens"])
    assert last["sampled_tokens_per_s"] == pytest.approx(summary["sampled_tokens_per_s"], rel=1e-6)
    assert last["run_s"] > 0 and steps == set(range(1, 9))


def test_tensorboard_reads_the_event_files(logged: Path, summary: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged / "out" / "tensorboard"))
    events.Reload()
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    check(last, {event.step for event in events.Scalars("sample/turns")}, summary)
    rewards = [event.value for event in events.Scalars("sample/reward")]
    assert rewards == [one.reward for one in read_results(logged / "out") if one.reward is not None]


@pytest.fixture(scope="module")
def mlflow_client(logged: Path) -> Any:
    """Return a client of the run's store, which keeps the database open."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{logged / 'ml.db'}")
    client.search_experiments()
    return client


def test_mlflow_reads_its_store(mlflow_client: Any, summary: dict[str, Any]) -> None:
    experiment = mlflow_client.get_experiment_by_name("prorl-envs")
    [run] = mlflow_client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["environment"] == "bash"
    history = mlflow_client.get_metric_history(run.info.run_id, "sample/turns")
    check(run.data.metrics, {metric.step for metric in history}, summary)


def test_wandb_has_the_run_in_its_file(logged: Path, summary: dict[str, Any]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = (logged / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    last: dict[str, float] = {}
    steps, projects = set(), set()
    for content in records(path.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "run":
            projects.add(record.run.project)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            steps.add(values["_step"])
            last.update(values)
    assert projects == {"lab"}
    check(last, steps, summary)


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, which W&B uses: after a header of 7 bytes, blocks
    of 32 KiB with chunks of checksum, length, type (1 whole, 2 first, 3 middle, 4 last), content."""
    block, header, offset, parts = 32_768, 7, 7, b""
    while offset + header <= len(content):
        if block - offset % block < header:
            offset += block - offset % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        offset += header
        parts += content[offset : offset + length]
        offset += length
        if kind in (1, 4):
            yield parts
            parts = b""


def test_a_failing_logger_does_not_stop_the_run(cli: Cli, tmp_path: Path, model: list[str]) -> None:
    (tmp_path / "file").touch()
    done = cli(
        "run",
        "bash",
        *model,
        "--limit",
        "1",
        "--samples",
        "2",
        "--out",
        "out",
        "--log",
        "tensorboard:dir=file",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: --log tensorboard stopped, the run continues: ") == 1
    assert len(list(read_results(tmp_path / "out"))) == 2 and (tmp_path / "out" / "summary.json").exists()


def test_a_missing_api_key_is_an_error_before_the_run(
    cli: Cli, tmp_path: Path, model: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    done = cli("run", "bash", *model, "--log", "wandb")
    assert done.returncode == 2 and "there is no API key" in done.stderr and "wandb login" in done.stderr
    assert not (tmp_path / "runs").exists()
