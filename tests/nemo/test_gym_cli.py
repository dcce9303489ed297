"""NeMo Gym's own command line with our environments: validate, start, evaluate, stop, without leaks."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from prorl_envs.cli.commands.new import FLAVOURS, RECORDED_NAME, new
from prorl_envs.env.base import Task
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.nemo.examples import (
    COUNT,
    EXAMPLE,
    METRICS,
    ROLLOUTS,
    example_rollouts,
    read_jsonl,
    write_examples,
)
from prorl_envs.nemo.responses import check_contiguous
from prorl_envs.nemo.root import GymRoot
from prorl_envs.nemo.rows import BUILT_IN, agent_name, jsonl, server_name, write_rows
from tests.nemo.conftest import free_port
from tests.nemo.gym import (
    CHECKOUT,
    GYM,
    HAS_ENVIRONMENT_SERVERS,
    RECORDING,
    SCAFFOLD,
    SITE,
    Gym,
    collect,
    config,
    environment,
    evaluate,
    gym,
    model_flags,
    prepared_root,
    server_folder,
    session_members,
    started,
    wait_until_gone,
)
from tests.support.openai_server import scripted_openai

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900)]

FAMILIES = BUILT_IN
#: Scaffolded environments, one of each flavour if the examples are recorded.
NEW = tuple(f"lab_{flavour}" for flavour in (FLAVOURS if RECORDING else ("bash",)))
#: Number of evaluated rows per example; a SWE-bench row runs a repository's tests.
ROWS = {"swebench": 5 if RECORDING else 1}
#: NeMo Gym 0.4 has no masks, so tests request them.
MASK = "++prorl_bash_resources_server.resources_servers.prorl_bash.failures=mask"
#: YAML file of our installed agent; from 0.7 on, of our environment server, which adds itself to the agent.
AGENT = SITE / (
    "environment_servers/prorl_rollouts/configs/prorl_rollouts.yaml"
    if HAS_ENVIRONMENT_SERVERS
    else "responses_api_agents/prorl_agent/configs/prorl_agent.yaml"
)
#: Sends rows with this task set to our environment server.
ROUTE = "+environment_server_routes.prorl_bash=prorl_rollouts"


#: 0.7 refuses agents without an environment server.
STRICT = ["+error_on_agent_without_environment_server=true"] if HAS_ENVIRONMENT_SERVERS else []


def documented() -> list[str]:
    """Return the options that docs/nemo-gym.md names for this version of NeMo Gym, one per way to drive."""
    page = (CHECKOUT / "docs" / "nemo-gym.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(--\S+ \S+)` \| `(--\S+ \S+)` \|", page, re.MULTILINE)
    assert len(rows) == 3
    return [new if HAS_ENVIRONMENT_SERVERS else old for new, old in rows]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> GymRoot:
    packages = tmp_path_factory.mktemp("packages")
    made = [new(name, name.removeprefix("lab_"), packages) for name in NEW]
    return prepared_root(tmp_path_factory.mktemp("gym"), made)


@pytest.fixture(scope="module")
def model_url(root: GymRoot) -> Iterator[str]:
    tasks: list[Task] = [task for name in FAMILIES for task in load_tasks(name, example_path(name))]
    tasks += [task for name in NEW for task in installed_tasks(root, name)]
    with scripted_openai(tasks) as url:
        yield url


def installed_tasks(root: GymRoot, name: str) -> list[Task]:
    """Return the tasks of an environment installed into the root, with the fields that the model needs."""
    rows = read_jsonl(root.path / name / "data" / "example.jsonl")
    return [Task.model_validate({key: row[key] for key in Task.model_fields if key in row}) for row in rows]


@pytest.fixture(scope="module")
def running(
    root: GymRoot, model_url: str, service: str, base_image: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gym]:
    """NeMo Gym with all families, the shell tasks again for an agent that steps, and the rollout service's
    agent."""
    flavour = "single_agent_turn" if HAS_ENVIRONMENT_SERVERS else "prorl_{}"
    configs = [config(root, name, flavour.format(name)) for name in FAMILIES]
    configs += [config(root, name, f"prorl_{name}") for name in NEW]
    configs += [config(root, "bash", "gymnasium"), AGENT]
    selection = [flag for path in configs for flag in ("--config", str(path))]
    with (tmp_path_factory.mktemp("log") / "gym.log").open("w") as log:
        to_service = f"++prorl_agent.responses_api_agents.prorl_agent.service={service}"
        arguments = [*selection, "--model-type", "openai_model", *model_flags(model_url), MASK, to_service]
        with started(root, log, *arguments) as gym:
            yield gym


def example_rows(root: GymRoot, name: str) -> list[dict[str, Any]]:
    return read_jsonl(server_folder(root, name) / EXAMPLE)[: ROWS.get(name, COUNT)]


@pytest.mark.parametrize("name", [*FAMILIES, *NEW])
@pytest.mark.parametrize("selection", documented())
def test_the_documented_configuration_is_valid(root: GymRoot, name: str, selection: str) -> None:
    if ("prorl_bash" not in selection and name != "bash") or ("gymnasium" in selection and name in NEW):
        pytest.skip("there is no such file for this environment")
    selected = selection.replace("prorl_bash", f"prorl_{name}").split()
    done = gym(root, "env", "validate", *selected, "--model-type", "openai_model", *STRICT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_environments_are_listed_and_valid_by_name(root: GymRoot) -> None:
    listed = gym(root, "list", "environments", "--json")
    names = {environment["name"] for environment in json.loads(listed.stdout.splitlines()[-1])}
    assert {f"prorl_{name}" for name in FAMILIES} <= names
    selected = ("--environment", "prorl_bash", "--model-type", "openai_model", *STRICT)
    done = gym(root, "env", "validate", *selected)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("selection", [("--resources-server", "prorl_bash"), ("--config", str(AGENT))])
def test_tasks_become_training_data(root: GymRoot, selection: tuple[str, str]) -> None:
    for kind in ("train", "validation"):
        write_rows("bash", example_path("bash"), root.path / "data" / "prorl_bash" / f"{kind}.jsonl")
    asked = ["--model-type", "openai_model", "--mode", "train_preparation", "--output-dir", "ready"]
    done = gym(root, "dataset", "collate", *selection, *asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ready = read_jsonl(root.path / "ready" / "train.jsonl")
    assert len(ready) == len(load_tasks("bash", example_path("bash")))
    agent = agent_name("bash") if "prorl_bash" in selection else "prorl_agent"
    # 0.7 names a row's origin and finds its agent by that; 0.4 names the agent.
    assert {row.get("task_source") or row["agent_ref"]["name"] for row in ready} == {agent}


@pytest.mark.parametrize("name", [*FAMILIES, *NEW])
def test_the_reference_reaches_reward_1(running: Gym, name: str, tmp_path: Path) -> None:
    rows = example_rows(running.root, name)
    output = tmp_path / "rollouts.jsonl"
    results = evaluate(running, agent_name(name), rows, output)
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    assert not any(result["mask_sample"] for result in results)
    if RECORDING:
        record(running.root, name, output)
    text = recorded_file(running.root, name, ROLLOUTS).read_text().replace(RECORDED_NAME, name)
    recorded = [json.loads(line) for line in text.splitlines()][: len(rows)]
    assert [comparable(one) for one in example_rollouts(results)] == [comparable(one) for one in recorded], (
        "record them again: scripts/nemo-examples.sh"
    )


def recorded_file(root: GymRoot, name: str, part: str) -> Path:
    """Return the path of a recorded file: in the checkout if this run records, otherwise in the installed
    package."""
    if not RECORDING:
        return server_folder(root, name) / part
    if name in NEW:
        return SCAFFOLD / name.removeprefix("lab_") / Path(part).name
    return CHECKOUT / "envs" / name / "nemo" / "server" / part


def record(root: GymRoot, name: str, rollouts: Path) -> None:
    """Write the example files of a family into the checkout."""
    if name in NEW:
        recorded = jsonl(example_rollouts(read_jsonl(rollouts))).replace(name, RECORDED_NAME)
        recorded_file(root, name, ROLLOUTS).write_text(recorded)
    else:
        write_examples(name, CHECKOUT / "envs" / name / "nemo" / "server", rollouts)


def comparable(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that do not depend on the version of NeMo Gym or the machine; floats are rounded."""
    output = [
        {key: item.get(key) for key in ("type", "name", "arguments", "output", "call_id", "content")}
        for item in rollout["response"]["output"]
    ]
    keys = (
        "task_id",
        "environment",
        "reward",
        "reward_components",
        "evidence",
        "mask_sample",
        "_ng_task_index",
    )
    text = json.dumps({key: rollout[key] for key in keys} | {"output": output})
    found: dict[str, Any] = json.loads(re.sub(r"\d+\.\d{7,}", lambda number: f"{float(number[0]):.7g}", text))
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *NEW])
def test_the_example_metrics_match_the_examples(root: GymRoot, name: str) -> None:
    """NeMo Gym compares its metrics with those in the file."""
    # 0.4 finds environments in the root only from there; the others get a folder of their own.
    within = "." if name in NEW else f"metrics-{name}"
    written = root.path / within / "resources_servers" / server_name(name) / METRICS
    written.parent.mkdir(parents=True, exist_ok=True)
    if RECORDING:
        written.unlink(missing_ok=True)
    elif name not in NEW:
        shutil.copy(recorded_file(root, name, METRICS), written)
    flags = ["--resources-server", server_name(name), "--model-type", "openai_model"]
    flags += ["--mode", "example_validation", "--output-dir", f"ready-{name}"]
    done = gym(root, "dataset", "collate", *flags, within=within)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = written.read_text()
    assert json.loads(text)["Number of examples"] == COUNT
    if RECORDING:
        stored = text.replace(name, RECORDED_NAME) if name in NEW else text
        recorded_file(root, name, METRICS).write_text(stored + "\n")


@pytest.mark.skipif(not HAS_ENVIRONMENT_SERVERS, reason="NeMo Gym 0.7 has schemas")
@pytest.mark.parametrize("name", [*FAMILIES, *NEW])
def test_the_schema_of_the_tasks(root: GymRoot, name: str) -> None:
    shown = gym(root, "env", "schema", "--resources-server", server_name(name))
    assert shown.returncode == 0 and '"task"' in shown.stdout, shown.stdout[-3000:] + shown.stderr[-3000:]


def test_the_reference_reaches_reward_1_stepped(running: Gym, tmp_path: Path) -> None:
    rows = example_rows(running.root, "bash")
    results = evaluate(running, "prorl_bash_gymnasium_agent", rows, tmp_path / "rollouts.jsonl")
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    assert all(result["terminated"] for result in results)


def test_a_row_is_a_rollout_of_the_service(running: Gym, tmp_path: Path) -> None:
    rows = example_rows(running.root, "bash")[:4]
    results = evaluate(running, "prorl_agent", rows, tmp_path / "rollouts.jsonl")
    assert [result["reward"] for result in results] == [1.0] * len(rows)
    for result in results:
        check_contiguous(result["response"]["output"])
        assert any("generation_token_ids" in item for item in result["response"]["output"])


@pytest.mark.skipif(not HAS_ENVIRONMENT_SERVERS, reason="NeMo Gym 0.4 has no environment servers")
def test_the_environment_server_runs_materialized_rows(running: Gym, tmp_path: Path) -> None:
    from nemo_gym.task_materialization import materialize_task

    rows = example_rows(running.root, "bash")[:3]
    rows[2]["verifier_metadata"]["task"]["setup"] = "exit 3"
    chosen, output = tmp_path / "rows.jsonl", tmp_path / "rollouts.jsonl"
    chosen.write_text(
        jsonl(materialize_task(row, taskset="prorl_bash", task_index=i) for i, row in enumerate(rows))
    )
    results = collect(running, chosen, output, ROUTE)
    assert [result["reward"] for result in results] == [1.0, 1.0]
    for result in results:
        check_contiguous(result["response"]["output"])
    (failed,) = read_jsonl(output.with_name("rollouts_failures.jsonl"))
    assert (failed["_ng_failure_stage"], failed["_ng_failure_terminal"]) == ("seed", True)
    assert "setup failed" in failed["_ng_failure_message"] and "reward" not in failed


def test_an_interrupted_run_is_resumed(running: Gym, tmp_path: Path) -> None:
    output, rows = tmp_path / "rollouts.jsonl", example_rows(running.root, "bash")[:3]
    first, *_ = evaluate(running, agent_name("bash"), rows, output)
    output.write_text(output.read_text().splitlines(keepends=True)[0])
    results = collect(running, tmp_path / "rows.jsonl", output, "--agent", agent_name("bash"), "--resume")
    assert results[0] == first
    assert sorted(result["_ng_task_index"] for result in results) == [0, 1, 2]
    assert all(result["reward"] == 1.0 for result in results)


@pytest.mark.skipif(not HAS_ENVIRONMENT_SERVERS, reason="NeMo Gym 0.4 verifies no stored rollouts")
def test_stored_rollouts_are_verified_again(running: Gym, model_url: str, tmp_path: Path) -> None:
    output, again = tmp_path / "rollouts.jsonl", tmp_path / "again.jsonl"
    rows = example_rows(running.root, "math")
    evaluate(running, agent_name("math"), rows, output)
    inputs = output.with_name("rollouts_materialized_inputs.jsonl")
    files = ["--inputs", str(inputs), "--rollouts", str(output), "--output", str(again)]
    selection = ["--config", str(config(running.root, "math", "single_agent_turn"))]
    # It starts servers of its own, and waits for the model, which it does not use.
    model = [f"++policy_base_url={model_url}", "++policy_api_key=none", "++policy_model_name=none"]
    head = ["++head_server.host=127.0.0.1", f"++head_server.port={free_port()}"]
    flags = [*selection, "--model-type", "openai_model", *model, *files, *running.root.flags, *head]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [GYM, "eval", "reverify", *flags],
            cwd=running.root.path,
            env=environment(running.root),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(600)
        finally:
            for ending in (signal.SIGTERM, signal.SIGKILL):  # NeMo Gym may leave its own servers
                for member in session_members(process.pid):
                    os.kill(int(member.split()[0]), ending)
                wait_until_gone(process.pid)
            process.wait()
    assert status == 0, (tmp_path / "log").read_text()[-3000:]
    assert [result["reward"] for result in read_jsonl(again)] == [1.0] * len(rows)


def test_an_internal_failure_has_no_reward_and_the_others_continue(running: Gym, tmp_path: Path) -> None:
    good, other = example_rows(running.root, "bash")[:2]
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
