"""NeMo Gym's own command line on our environments: validate, start, evaluate, stop, and nothing is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.nemo.responses import check_contiguous
from prorl_envs.nemo.root import GymRoot, gym_root
from prorl_envs.nemo.rows import agent_name, write_rows
from prorl_envs.testing.openai_face import Behaviour, scripted_openai
from tests.nemo.conftest import SERVICE_TOKEN

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]

GYM = Path(sys.executable).with_name("gym")
FAMILIES = ("bash", "code", "ipython", "math", "stem", "swebench")
#: Rows of each example evaluated here; a SWE-bench row builds a repository at its first use.
ROWS = {"bash": 100, "code": 4, "ipython": 100, "math": 4, "stem": 4, "swebench": 1}
#: NeMo Gym 0.4 knows no masks, so they are asked for.
MASK = "++prorl_bash_resources_server.resources_servers.prorl_bash.failures=mask"
READY = "servers ready!"
#: The YAML file of our agent, where it is installed.
AGENT = Path(sysconfig.get_path("purelib")) / "responses_api_agents/prorl_agent/configs/prorl_agent.yaml"


@dataclass(frozen=True)
class Gym:
    """A running NeMo Gym.

    Args:
        root: where it runs, with the flags it was given.
        flags: that tell another `gym` where it is.
    """

    root: GymRoot
    flags: tuple[str, ...]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gym(root: GymRoot, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(GYM), *arguments],
        cwd=root.path,
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(root: GymRoot) -> dict[str, str]:
    """What NeMo Gym's processes see. Ray's sockets need a short path of their own."""
    quiet = {"PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    own = {"RAY_TMPDIR": str(root.path / "r"), "PRORL_SERVER__TOKEN": SERVICE_TOKEN}
    return os.environ | quiet | own


def session_members(session: int) -> list[str]:
    """The living processes of a session: NeMo Gym, its servers and Ray."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, owner = rest.split()[:4]
        if int(owner) == session and state != "Z":
            members.append(name + ")")
    return members


@contextmanager
def started(root: GymRoot, log: IO[str], *arguments: str) -> Iterator[Gym]:
    """`gym env start` in a session of its own, until the block ends; interrupted, as Ctrl-C does."""
    head = ("++head_server.host=127.0.0.1", f"++head_server.port={free_port()}")
    command = [str(GYM), "env", "start", *arguments, *root.flags, *head]
    process = subprocess.Popen(
        command,
        cwd=root.path,
        env=environment(root),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until_ready(process, Path(log.name))
        yield Gym(root, head)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
            left = wait_until_gone(process.pid)
        finally:
            # Whatever is still in the session after an orderly end is a leak; it must not outlive the test.
            for member in session_members(process.pid):
                os.kill(int(member.split()[0]), signal.SIGKILL)
            process.wait()
    assert not left, f"left behind: {left}"


def wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 600
    while READY not in log.read_text():
        assert process.poll() is None, f"gym env start ended:\n{log.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"not ready:\n{log.read_text()[-5000:]}"
        time.sleep(0.2)


def wait_until_gone(session: int) -> list[str]:
    deadline = time.monotonic() + 20
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> GymRoot:
    return gym_root(tmp_path_factory.mktemp("gym"))


@pytest.fixture(scope="module")
def model_url() -> Iterator[str]:
    tasks = chain.from_iterable(load_tasks(name, example_path(name)) for name in FAMILIES)
    with scripted_openai(list(tasks)) as url:
        yield url


def model_flags(url: str) -> list[str]:
    return ["--model", str(Behaviour.REFERENCE), "--model-url", url, "--model-api-key", "none"]


def config(name: str, flavour: str) -> Path:
    """A family's YAML file, where the package is installed."""
    return Path(example_path(name)).parents[1] / "configs" / f"{flavour}.yaml"


@pytest.fixture(scope="module")
def running(
    root: GymRoot, model_url: str, service: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gym]:
    """All families, the shell tasks once more for an agent that steps, and the rollout service's agent."""
    configs = [config(name, f"prorl_{name}") for name in FAMILIES] + [config("bash", "gymnasium"), AGENT]
    selection = [flag for path in configs for flag in ("--config", str(path))]
    with (tmp_path_factory.mktemp("log") / "gym.log").open("w") as log:
        to_service = f"++prorl_agent.responses_api_agents.prorl_agent.service={service}"
        arguments = [*selection, "--model-type", "openai_model", *model_flags(model_url), MASK, to_service]
        with started(root, log, *arguments) as gym:
            yield gym


def evaluate(running: Gym, agent: str, rows: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """`gym eval run` on `rows`; what it wrote to `output`."""
    chosen = output.with_name("rows.jsonl")
    chosen.write_text("".join(json.dumps(row | {"agent_ref": {"name": agent}}) + "\n" for row in rows))
    flags = ["--agent", agent, "--input", str(chosen), "--output", str(output), "--concurrency", "4"]
    done = gym(running.root, "eval", "run", "--no-serve", *flags, *running.flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_jsonl(output)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def example_rows(name: str) -> list[dict[str, Any]]:
    return read_jsonl(nemo_example(name))[: ROWS[name]]


def nemo_example(name: str) -> Path:
    return example_path(name).with_name("nemo_example.jsonl")


@pytest.mark.parametrize("flavour", ["", "/gymnasium"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_configuration_is_valid(root: GymRoot, name: str, flavour: str) -> None:
    selection = ["--resources-server", f"prorl_{name}{flavour}", "--model-type", "openai_model"]
    done = gym(root, "env", "validate", *selection)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_environments_are_listed_and_valid_by_name(root: GymRoot) -> None:
    listed = gym(root, "list", "environments", "--json")
    names = {environment["name"] for environment in json.loads(listed.stdout.splitlines()[-1])}
    assert {f"prorl_{name}" for name in FAMILIES} <= names
    done = gym(root, "env", "validate", "--environment", "prorl_bash", "--model-type", "openai_model")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("selection", [("--resources-server", "prorl_bash"), ("--config", str(AGENT))])
def test_tasks_become_training_data(root: GymRoot, selection: tuple[str, str]) -> None:
    for kind in ("train", "validation"):
        write_rows("bash", example_path("bash"), root.path / "data" / "prorl_bash" / f"{kind}.jsonl")
    asked = ["--model-type", "openai_model", "--mode", "train_preparation", "--output-dir", "ready"]
    done = gym(root, "dataset", "collate", *selection, *asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ready = read_jsonl(root.path / "ready" / "train.jsonl")
    assert len(ready) == len(example_rows("bash"))
    agent = agent_name("bash") if "prorl_bash" in selection else "prorl_agent"
    # 0.7 names where a row comes from, and leads it to an agent by that; 0.4 names the agent.
    assert {row.get("task_source") or row["agent_ref"]["name"] for row in ready} == {agent}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_reference_reaches_reward_1(running: Gym, name: str, tmp_path: Path) -> None:
    rows = example_rows(name)
    results = evaluate(running, agent_name(name), rows, tmp_path / "rollouts.jsonl")
    rewards = {result["task_id"]: result["reward"] for result in results}
    assert rewards == dict.fromkeys(rewards, 1.0) and len(rewards) == len(rows)
    assert not any(result["mask_sample"] for result in results)


def test_the_reference_reaches_reward_1_stepped(running: Gym, tmp_path: Path) -> None:
    rows = example_rows("bash")
    results = evaluate(running, "prorl_bash_gymnasium_agent", rows, tmp_path / "rollouts.jsonl")
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    assert all(result["terminated"] for result in results)


def test_a_row_is_a_rollout_of_the_service(running: Gym, tmp_path: Path) -> None:
    rows = example_rows("bash")[:4]
    results = evaluate(running, "prorl_agent", rows, tmp_path / "rollouts.jsonl")
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    for result in results:
        check_contiguous(result["response"]["output"])
        assert any("generation_token_ids" in item for item in result["response"]["output"])


def test_a_failure_of_ours_is_no_reward_and_the_others_go_on(running: Gym, tmp_path: Path) -> None:
    good, other = example_rows("bash")[:2]
    broken = json.loads(json.dumps(other))
    broken["verifier_metadata"]["task"]["setup"] = "exit 3"
    output = tmp_path / "rollouts.jsonl"
    results = evaluate(running, agent_name("bash"), [good, broken], output)
    assert [result["reward"] for result in results if not result["mask_sample"]] == [1.0]
    (masked,) = read_jsonl(output.with_name("rollouts_failures.jsonl")) or [
        r for r in results if r["mask_sample"]
    ]
    assert masked["failure_kind"] == "prorl:environment" and "setup failed" in masked["failure_reason"]
    (metrics,) = json.loads(output.with_name("rollouts_aggregate_metrics.json").read_text())
    assert metrics["agent_metrics"]["mean/reward"] == 1.0
