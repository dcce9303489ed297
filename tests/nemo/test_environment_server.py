"""NeMo Gym's environment server (0.7) with a real rollout service: episodes in, one result or failure out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("nemo_gym.base_environment_server", reason="NeMo Gym 0.7 and later")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.failure_kinds import is_namespaced, is_registered
from nemo_gym.single_agent_turn_types import SingleAgentTurnResponse
from nemo_gym.task_materialization import materialize_task

from prorl_envs.errors import FailureKind, InputError, ProrlError, SandboxLimit, SandboxMemoryLimit
from prorl_envs.nemo.environment_server import RolloutEnvironmentConfig, RolloutEnvironmentServer
from prorl_envs.nemo.failures import as_error, failure_kind
from prorl_envs.nemo.responses import check_contiguous
from prorl_envs.rollout.api.errors import NotFound, QueueFull, Unavailable
from prorl_envs.rollout.api.types import Failure, Stage
from tests.nemo.conftest import SERVICE_TOKEN, rows, server_client
from tests.support.serving import served

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(300), pytest.mark.usefixtures("loops_own_pipe")]


@contextmanager
def serving(service: str, **settings: Any) -> Iterator[httpx.Client]:
    """Serve the environment server over HTTP, with the framework's cancellation of dropped requests."""
    block: dict[str, Any] = {
        "entrypoint": "app.py",
        "service": service,
        "environment": "bash",
        "cleanup_timeout_seconds": 5,
    }
    config = RolloutEnvironmentConfig(name="prorl", host="127.0.0.1", port=0, **block | settings)
    server = RolloutEnvironmentServer(config=config, server_client=server_client())
    app = server.setup_webserver()
    server.setup_cancellation_middleware(app)
    with served(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture
def server(service: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    with serving(service) as client:
        yield client


@pytest.fixture
def trainer(service: str) -> Iterator[httpx.Client]:
    """Client of the service itself."""
    headers = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
    with httpx.Client(base_url=service, headers=headers, timeout=60) as client:
        yield client


def episode(row: dict[str, Any], **episode_id: Any) -> dict[str, Any]:
    """Return the request that NeMo Gym's collector sends for a materialized row."""
    task = materialize_task(row, taskset="bash:example", task_index=0)
    return {"episode_id": {"rollout_id": "0-0"} | episode_id, "task": task}


def run(server: httpx.Client, body: dict[str, Any]) -> SingleAgentTurnResponse:
    answer = server.post("/run", json=body)
    assert answer.status_code == 200, answer.text
    response = SingleAgentTurnResponse.model_validate(answer.json())
    assert (response.result is None) != (response.failure is None)
    return response


@pytest.mark.parametrize("form", ["verifier_metadata", "merged", "alone"])
def test_an_episode_has_a_result_of_the_frameworks_shape(server: httpx.Client, form: str) -> None:
    row = rows()[0]
    body = episode(row, attempt=2)
    task = row["verifier_metadata"]["task"]
    if form != "verifier_metadata":
        params = row["responses_create_params"]
        data = {"task": task} if form == "merged" else task
        body["task"]["task_input"] = {"responses_create_params": params, "task_data": data}
    response = run(server, body)
    assert response.result is not None
    assert (response.episode_id.capture_key, response.task_id.taskset) == ("0-0-a2", "bash:example")
    result = response.result.model_dump()
    assert (result["reward"], result["mask_sample"], result["failure_kind"]) == (1.0, False, None)
    assert result["task_id"] == task["id"]
    items = result["response"]["output"]
    check_contiguous(items)
    assert any(item.get("generation_token_ids") for item in items)


def test_a_flat_row_is_answered_flat(server: httpx.Client) -> None:
    answer = server.post("/run", json=rows()[0] | {"_ng_task_index": 0, "_ng_rollout_index": 1}).json()
    assert (answer["reward"], answer["mask_sample"]) == (1.0, False) and answer["response"]["output"]
    broken = rows()[0]
    broken["verifier_metadata"]["task"]["setup"] = "exit 3"
    failed = server.post("/run", json=broken).json()
    assert (failed["_ng_failure_class"], failed["_ng_failure_terminal"]) == (
        "environment_server_failed",
        True,
    )
    assert (failed["_ng_failure_stage"], failed["failure_kind"]) == ("seed", "prorl:environment")
    assert "setup failed" in failed["_ng_failure_message"] and "reward" not in failed
    refused = server.post("/run", json=rows()[0] | {"_ng_rollout_id": "x-a1"})
    assert refused.status_code == 422 and "rollout_id" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"setup": "exit 3"}, ("prorl:environment", "seed", True)),
        ({"checks": [{"type": "no such check"}]}, ("prorl:input", "admission", True)),
    ],
)
def test_a_failure_names_its_stage_and_whether_to_try_again(
    server: httpx.Client, change: dict[str, Any], expected: tuple[str, str, bool]
) -> None:
    row = rows()[0]
    row["verifier_metadata"]["task"] |= change
    failure = run(server, episode(row)).failure
    assert failure is not None
    assert (failure.failure_kind, failure.stage, failure.terminal) == expected


def test_an_unknown_environment_is_refused_at_admission(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    with serving(service, environment="none") as server:
        failure = run(server, episode(rows()[0])).failure
        malformed = server.post("/run", json={"episode_id": {"rollout_id": "0-0"}, "task": {}})
    assert failure is not None
    found = (failure.failure_kind, failure.stage, failure.terminal)
    assert found == ("prorl:input", "admission", True)
    assert malformed.status_code == 422 and "task_input" in malformed.json()["error"]["message"]


def test_an_unreachable_service_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_envs.nemo.rollouts.AWAY_S", 0.5)
    with serving("http://127.0.0.1:9") as server:
        failure = run(server, episode(rows()[0])).failure
    assert failure is not None
    found = (failure.failure_kind, failure.stage, failure.terminal)
    assert found == ("transport_unreachable", None, False)


@pytest.mark.parametrize("run_id", ["", "limited"])
def test_the_frameworks_time_limit_cancels_the_job(
    service: str, trainer: httpx.Client, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    row = rows()[0]
    row["verifier_metadata"]["task"]["setup"] = "sleep 600"
    cancelled = trainer.get("/v1/status").json()["finished"].get("cancelled", 0)
    with serving(service, default_episode_timeout_seconds=2, run_id=run_id) as server:
        failure = run(server, episode(row)).failure
        assert failure is not None
        assert (failure.failure_reason, failure.terminal) == ("Episode timed out", False)
        until_cancelled(trainer, cancelled + 1)


def test_a_caller_that_disconnects_cancels_its_job(server: httpx.Client, trainer: httpx.Client) -> None:
    row = rows()[0]
    row["verifier_metadata"]["task"]["setup"] = "sleep 600"
    cancelled = trainer.get("/v1/status").json()["finished"].get("cancelled", 0)
    with pytest.raises(httpx.ReadTimeout):
        server.post("/run", json=episode(row), timeout=3)
    until_cancelled(trainer, cancelled + 1)


def until_cancelled(trainer: httpx.Client, count: int) -> None:
    """Wait until the service has no job left, and check the number of cancelled ones."""
    for _ in range(100):
        status = trainer.get("/v1/status").json()
        if status["unfinished"] == 0:
            break
        trainer.get("/v1/results", params={"after": status["newest_cursor"], "wait_s": 0.5})
    assert (status["unfinished"], status["finished"].get("cancelled")) == (0, count)


def test_admission_is_limited_by_the_framework(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    row = rows()[0]
    row["verifier_metadata"]["task"]["setup"] = "sleep 600"
    limits = {"max_concurrent_episodes": 1, "queue_timeout_seconds": 0.5}
    with serving(service, **limits) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.post("/run", json=episode(row), timeout=2)
        assert run(server, episode(rows()[0])).result is not None, "the dropped request left its place"


def connected(cause: Exception) -> ProrlError:
    error = Unavailable("the rollout service does not answer")
    error.__cause__ = cause
    return error


def job(kind: FailureKind, stage: Stage = Stage.RUN) -> ProrlError:
    return as_error(Failure(kind=kind, stage=stage, message="it failed"))


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (job(FailureKind.SANDBOX), "provider_unavailable"),
        (SandboxLimit("it wrote too much"), "provider_unavailable"),
        (SandboxMemoryLimit("it needs more memory"), "provider_oom_killed"),
        (job(FailureKind.AGENT), "agent_run_error"),
        (job(FailureKind.NODE), "transport_unreachable"),
        (job(FailureKind.TIMEOUT), "agent_timeout"),
        (job(FailureKind.TIMEOUT, Stage.EVAL), "verifier_error"),
        (job(FailureKind.TIMEOUT, Stage.INIT), "prorl:timeout"),
        (job(FailureKind.GRADER, Stage.EVAL), "verifier_error"),
        (job(FailureKind.MODEL), "prorl:model"),
        (job(FailureKind.CANCELLED), "cancelled"),
        (QueueFull("the quota is 4 unfinished jobs"), "provider_quota_exhausted"),
        (connected(httpx.ConnectError("refused")), "transport_unreachable"),
        (connected(httpx.ReadTimeout("")), "transport_timeout"),
        (connected(httpx.RemoteProtocolError("")), "transport_peer_drop"),
        (connected(httpx.PoolTimeout("")), "transport_local_resource"),
        (Unavailable("the service is stopping"), "prorl:service"),
        (NotFound("no group 'g'"), "session_lost"),
        (InputError("no such task"), "prorl:input"),
    ],
)
def test_failures_have_the_frameworks_names(error: ProrlError, word: str) -> None:
    assert failure_kind(error) == word
    assert is_registered(word) or is_namespaced(word)
