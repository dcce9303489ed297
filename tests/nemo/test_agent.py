"""NeMo Gym's agent with a real rollout service: rows in, graded token rollouts out."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"

from prorl_envs.nemo.agent import RolloutAgent, RolloutAgentConfig
from prorl_envs.nemo.responses import check_contiguous
from prorl_envs.nemo.wire import KNOWS_MASKS
from tests.nemo.conftest import SERVICE_TOKEN, rows, server_client
from tests.support.serving import served

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(300), pytest.mark.usefixtures("loops_own_pipe")]


@contextmanager
def serving(service: str, **settings: Any) -> Iterator[httpx.Client]:
    """Serve the agent over HTTP."""
    config = RolloutAgentConfig(
        name="prorl_agent",
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        service=service,
        environment="bash",
        **settings,
    )
    agent = RolloutAgent(config=config, server_client=server_client())
    app = agent.setup_webserver()
    if KNOWS_MASKS:  # as NeMo Gym 0.7 runs it
        agent.setup_cancellation_middleware(app)
    with served(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture
def agent(service: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    with serving(service) as client:
        yield client


def test_a_rollout_is_graded_and_one_contiguous_row(agent: httpx.Client) -> None:
    row = rows()[0]
    answer = agent.post("/run", json=row)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["reward"] == 1.0 and body["mask_sample"] is False
    asked, echoed = (of["responses_create_params"]["input"] for of in (row, body))
    assert [message["content"] for message in echoed] == [message["content"] for message in asked]
    items = body["response"]["output"]
    calls = [item for item in items if "generation_token_ids" in item]
    assert len(calls) >= 2 and all(
        len(c["generation_token_ids"]) == len(c["generation_log_probs"]) > 0 for c in calls
    )
    assert any(item["type"] == "function_call_output" for item in items)
    check_contiguous(items)
    tools = {tool["name"] for tool in body["response"]["tools"]}
    assert tools == {tool["name"] for tool in row["responses_create_params"]["tools"]}
    assert body["response"]["usage"]["output_tokens"] == sum(len(c["generation_token_ids"]) for c in calls)


@pytest.mark.anyio
async def test_concurrent_requests_each_get_their_own_rollout(service: str, agent: httpx.Client) -> None:
    chosen = rows()[:4] * 2
    async with httpx.AsyncClient(base_url=agent.base_url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post("/run", json=row) for row in chosen))
    asked = [row["verifier_metadata"]["task"]["id"] for row in chosen]
    assert [answer.json()["task_id"] for answer in answers] == asked
    assert {answer.json()["reward"] for answer in answers} == {1.0}


def test_the_requested_sampling_is_used_by_the_service(agent: httpx.Client) -> None:
    row = rows()[0]
    row["responses_create_params"] |= {"temperature": 99.0}
    refused = agent.post("/run", json=row)
    assert refused.status_code == 422 and "temperature" in refused.json()["error"]["message"]


def test_a_row_that_the_service_refuses_is_a_client_error(agent: httpx.Client) -> None:
    row = rows()[0]
    row["verifier_metadata"]["task"]["checks"] = [{"type": "no such check"}]
    refused = agent.post("/run", json=row)
    assert refused.status_code == 422 and "checks" in refused.json()["error"]["message"]


def test_a_failure_is_never_a_reward(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    row = rows()[0]
    row["verifier_metadata"]["task"]["setup"] = "exit 3"
    with serving(service, failures="error") as agent:
        failed = agent.post("/run", json=row)
        assert failed.status_code == 500 and failed.json()["error"]["kind"] == "prorl:environment"
    with serving(service, failures="mask") as agent:
        masked = agent.post("/run", json=row).json()
        assert (masked["mask_sample"], masked["failure_kind"]) == (True, "prorl:environment")
        assert KNOWS_MASKS or masked["_ng_failure_class"] == "prorl:environment"


def test_a_wrong_token_is_reported(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_envs.nemo.rollouts.AWAY_S", 2.0)
    monkeypatch.setenv("PRORL_SERVER__TOKEN", "another-token-of-some-length")
    with serving(service) as agent:
        refused = agent.post("/run", json=rows()[0])
    assert refused.status_code == 503 and "does not answer" in refused.json()["error"]["message"]


def test_a_caller_that_disconnects_cancels_its_rollout(service: str, agent: httpx.Client) -> None:
    row = rows()[0]
    row["verifier_metadata"]["task"]["setup"] = "sleep 600"
    with pytest.raises(httpx.ReadTimeout):
        agent.post("/run", json=row, timeout=3)
    headers = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
    with httpx.Client(base_url=service, headers=headers, timeout=60) as trainer:
        for _ in range(100):
            status = trainer.get("/v1/status").json()
            if status["unfinished"] == 0:
                break
            trainer.get("/v1/results", params={"after": status["newest_cursor"], "wait_s": 0.5})
        assert status["unfinished"] == 0 and status["finished"]["cancelled"] == 1
