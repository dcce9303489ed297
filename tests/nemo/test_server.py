"""The bash family behind NeMo Gym's routes: a real server, real sandboxes, real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym import server_utils
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

from prorl_envs.env.base import ReferenceCall
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.nemo.examples import EXAMPLE, read_jsonl
from prorl_envs.nemo.failures import TOOL_UNAVAILABLE
from prorl_envs.nemo.process import live_within
from prorl_envs.nemo.rows import BUILT_IN, blank, nemo_row, write_rows
from prorl_envs.nemo.server import EnvironmentServer
from prorl_envs.nemo.wire import KNOWS_MASKS, KNOWS_SESSIONS, EnvironmentServerConfig
from tests.nemo.conftest import server_client
from tests.nemo.gym import CHECKOUT
from tests.support.kernel import ROW, write_kernel_files
from tests.support.serving import served

pytestmark = [pytest.mark.nemo, pytest.mark.usefixtures("loops_own_pipe")]

TASK = {
    "id": "greet",
    "instruction": "Write 'hello' into greeting.txt.",
    "checks": [{"type": "file_equals", "path": "greeting.txt", "text": "hello"}],
}
EASY = TASK | {"id": "easy", "checks": [{"type": "file_absent", "path": "nothing"}]}
SOLVE = "printf hello > greeting.txt"


def server_of(environment: str = "bash", **settings: Any) -> EnvironmentServer:
    config = EnvironmentServerConfig(
        name=f"prorl_{environment}",
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        domain="agent",
        environment=environment,
        **settings,
    )
    return EnvironmentServer(config=config, server_client=server_client())


@contextmanager
def serving(environment: str = "bash", **settings: Any) -> Iterator[str]:
    with served(server_of(environment, **settings).setup_webserver()) as url:
        yield url


@contextmanager
def client(**settings: Any) -> Iterator[httpx.Client]:
    """Client like an agent's; it keeps the cookies."""
    with serving(**settings) as url, httpx.Client(base_url=url, timeout=60) as agent:
        yield agent


def example(name: str) -> dict[str, Any]:
    """Return the first example row of a family's server."""
    return read_jsonl(CHECKOUT / "envs" / name / "nemo" / "server" / EXAMPLE)[0]


def row(task: dict[str, Any]) -> dict[str, Any]:
    return nemo_row(blank("bash"), task)


def answer(*calls: tuple[str, str]) -> dict[str, Any]:
    """Return a model's answer with tool calls of name and arguments; without any, a closing text."""
    text = {"type": "output_text", "text": "Done.", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    items = [
        {"type": "function_call", "id": f"f{n}", "call_id": f"c{n}", "name": name, "arguments": arguments}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {
        "id": "r",
        "object": "response",
        "created_at": 0,
        "model": "m",
        "output": items or [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def bash(command: str) -> tuple[str, str]:
    return "bash", json.dumps({"command": command})


def verify(agent: httpx.Client, task: dict[str, Any] = TASK) -> httpx.Response:
    return agent.post("/verify", json=row(task) | {"response": answer()})


def seed(agent: httpx.Client, task: dict[str, Any] = TASK) -> httpx.Response:
    return agent.post("/seed_session", json=row(task))


def test_an_episode_runs_from_seed_to_reward() -> None:
    with client() as agent:
        assert seed(agent).status_code == 200
        assert agent.post("/bash", json={"command": "x=1; echo one"}).text.strip() == "one"
        assert agent.post("/bash", json={"command": "echo $x"}).text.strip() == "1"  # in the same shell
        agent.post("/bash", json={"command": SOLVE})
        verdict = verify(agent).json()
        assert verdict["reward"] == 1.0
        assert (verdict["task_id"], verdict["environment"]) == ("greet", "bash")
        assert verdict["evidence"] and verdict["reward_components"]
        assert verdict["mask_sample"] is False and verdict["failure_kind"] is None
        assert verify(agent).json()["reward"] == 1.0  # NeMo Gym repeats a request after a broken connection


def test_an_untouched_workspace_scores_zero() -> None:
    with client() as agent:
        seed(agent)
        assert verify(agent).json()["reward"] == 0.0


def test_a_jupyter_kernel_of_the_settings(tmp_path: Path) -> None:
    settings, data = write_kernel_files(tmp_path)
    write_rows("kernel", data, tmp_path / "rows.jsonl", settings)
    asked = json.loads((tmp_path / "rows.jsonl").read_text())
    with client(environment="kernel", config=settings) as agent:
        assert agent.post("/seed_session", json=asked).status_code == 200
        for call in ROW["reference"]:
            agent.post(f"/{call['tool']}", json=call["arguments"])
        verdict = agent.post("/verify", json=asked | {"response": answer()}).json()
    assert (verdict["reward"], verdict["environment"]) == (1.0, "kernel")


@pytest.mark.usefixtures("base_image")
@pytest.mark.timeout(300)  # swebench builds its instance
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_verifier_of_each_family(name: str) -> None:
    """Solved, solved again, unsolved, and malformed."""
    asked = example(name)
    reference = load_tasks(name, example_path(name))[0].reference
    nonsense = answer((reference[0].tool, "{no JSON"), ("no_such_tool", "[]"))

    def verdict(agent: httpx.Client, *calls: ReferenceCall, said: dict[str, Any]) -> dict[str, Any]:
        agent.cookies.clear()
        assert agent.post("/seed_session", json=asked).status_code == 200
        for call in calls:
            assert agent.post(f"/{call.tool}", json=call.arguments).status_code == 200
        found: dict[str, Any] = agent.post("/verify", json=asked | {"response": said}).json()
        assert (found["mask_sample"], found["failure_kind"]) == (False, None)
        return found

    with serving(name) as url, httpx.Client(base_url=url, timeout=200) as agent:
        full, again = (verdict(agent, *reference, said=answer()) for _ in range(2))
        assert (full["reward"], full["reward_components"]) == (1.0, again["reward_components"])
        assert again["reward"] == 1.0
        assert verdict(agent, said=answer())["reward"] == 0.0
        wrong = ReferenceCall(tool=reference[0].tool, arguments={"no such argument": []})
        assert verdict(agent, wrong, said=nonsense)["reward"] == 0.0


def test_two_agents_are_isolated() -> None:
    with serving() as url, httpx.Client(base_url=url) as one, httpx.Client(base_url=url) as other:
        seed(one)
        seed(other)
        one.post("/bash", json={"command": SOLVE})
        assert (verify(one).json()["reward"], verify(other).json()["reward"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("tool", "content", "says"),
    [
        ("bash", b'{"command": ', "not valid JSON"),
        ("bash", b'["ls"]', "must be a JSON object"),
        ("bash", b"{}", "command"),
        ("bash", b'{"command": 3}', "command"),
        ("no_such_tool", b"{}", "no tool"),
    ],
)
def test_mistakes_of_the_model_are_reported_to_the_model(tool: str, content: bytes, says: str) -> None:
    with client() as agent:
        seed(agent)
        reply = agent.post(f"/{tool}", content=content)
        assert (reply.status_code, says in reply.text) == (200, True), reply.text
        agent.post("/bash", json={"command": SOLVE})
        assert verify(agent).json()["reward"] == 1.0


def typed_seed(session: str, task_data: dict[str, Any]) -> dict[str, Any]:
    """Return the seed that an environment server of NeMo Gym 0.7 sends."""
    episode = {"rollout_id": "0-0", "attempt": 0}
    task = {"taskset": "examples", "task_id": "t"}
    return {"resources_session_id": session, "episode_id": episode, "task_id": task, "task_data": task_data}


def typed_close(session: str) -> dict[str, Any]:
    return {"resources_session_id": session, "episode_id": {"rollout_id": "0-0", "attempt": 0}}


@pytest.mark.usefixtures("base_image")
@pytest.mark.timeout(300)  # swebench builds its instance
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_session_contract_of_nemo_gym_holds(name: str) -> None:
    """With and without the server's lifespan; the check sends each request from another event loop."""
    contract = pytest.importorskip("nemo_gym.testing.session_conformance", reason="NeMo Gym 0.7 has it")
    from nemo_gym.base_resources_server import ResourcesSeedSessionRequest

    metadata = example(name)["verifier_metadata"]
    app = server_of(name).setup_webserver()
    for number, data in enumerate(({"verifier_metadata": metadata}, metadata, metadata["task"])):
        seed = ResourcesSeedSessionRequest(**typed_seed(f"s{number}", data))
        with TestClient(app) if number else nullcontext():
            contract.check_resources_session_contract(app, seed, keeps_state=True)


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_episode_with_a_typed_seed(wrapped: bool) -> None:
    data = {"verifier_metadata": {"task": TASK}} if wrapped else TASK
    with client() as agent:
        for _ in range(2):  # a repeated seed finds the same episode
            seeded = agent.post("/seed_session", json=typed_seed("s", data))
            assert (seeded.status_code, seeded.json()["resources_session_id"]) == (200, "s")
        agent.post("/bash", json={"command": SOLVE})
        verdict = agent.post("/verify", json=data | asked_and_answered())
        assert (verdict.json()["reward"], verdict.json()["task_id"]) == (1.0, "greet")
        assert agent.post("/close_session", json=typed_close("s")).status_code == 200


def asked_and_answered() -> dict[str, Any]:
    return {"responses_create_params": row(TASK)["responses_create_params"], "response": answer()}


def test_a_close_ends_the_sandbox_at_once() -> None:
    with serving(max_sessions=1) as url, httpx.Client(base_url=url, timeout=60) as agent:
        agent.post("/seed_session", json=typed_seed("one", {"task": TASK}))
        assert httpx.post(f"{url}/close_session", json=typed_close("one")).status_code == 200
        assert agent.post("/bash", json={"command": "ls"}).status_code == 500
        assert agent.post("/seed_session", json=typed_seed("one", {"task": TASK})).status_code == 422
        agent.cookies.clear()
        assert agent.post("/seed_session", json=typed_seed("two", {"task": TASK})).status_code == 200


def test_a_typed_seed_that_may_succeed_later_is_an_error_also_with_masks() -> None:
    with client(failures="mask", max_sessions=1, queue_s=0.1) as agent:
        for session, task, status in (("one", TASK, 200), ("two", TASK, 503)):
            agent.cookies.clear()
            assert agent.post("/seed_session", json=typed_seed(session, {"task": task})).status_code == status
        agent.post("/close_session", json=typed_close("one"))
        agent.cookies.clear()
        assert agent.post("/seed_session", json=typed_seed("three", {"task": BROKEN})).status_code == 200
        assert verify(agent, BROKEN).json()["failure_kind"] == "prorl:environment"


def test_a_row_of_another_family_names_both() -> None:
    with client() as agent:
        told = agent.post("/seed_session", json={"verifier_metadata": {"task": {"id": "m", "answer": "4"}}})
        assert told.status_code == 422
        assert "not a task of the environment 'bash': instruction" in told.json()["error"]["message"]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such setting: max_session; this server has .*max_sessions"):
        server_of(max_session=3)


@pytest.mark.parametrize(("name", "mode"), [("math", "stateless"), ("bash", "unsupported")])
def test_a_stored_rollout_is_verified_again_if_its_verdict_can_be_repeated(name: str, mode: str) -> None:
    asked = example(name)
    reference = load_tasks(name, example_path(name))[0].reference
    said = answer(*((call.tool, json.dumps(call.arguments)) for call in reference))
    lost = {"type": "function_call_output", "call_id": "c0", "output": TOOL_UNAVAILABLE}
    with serving(name, failures="mask") as url:
        if KNOWS_SESSIONS:
            assert httpx.get(f"{url}/reverify_mode").json() == mode
        verdict = httpx.post(f"{url}/verify", json=asked | {"response": said}, timeout=60).json()
        if mode == "stateless":
            assert (verdict["reward"], verdict["mask_sample"]) == (1.0, False)
            assert verdict["task_id"] == asked["verifier_metadata"]["task"]["id"]
            wrong = httpx.post(f"{url}/verify", json=asked | {"response": answer()}, timeout=60).json()
            assert (wrong["reward"], wrong["mask_sample"]) == (0.0, False)
            said["output"].append(lost)
            verdict = httpx.post(f"{url}/verify", json=asked | {"response": said}, timeout=60).json()
        assert (verdict["mask_sample"], verdict["failure_kind"]) == (True, "session_lost")


def test_the_tools_over_mcp() -> None:
    exposure = pytest.importorskip("nemo_gym.mcp_auto_exposure", reason="NeMo Gym 0.7 has it")
    server = server_of(expose_tools_over_mcp=True)
    app = server.setup_webserver()
    exposure.maybe_auto_expose(server, app)

    async def episode(url: str, access: dict[str, Any]) -> tuple[list[str], str]:
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        address = url + access["url_path"]
        async with (
            httpx.AsyncClient(headers=access["headers"]) as connection,
            streamable_http_client(address, http_client=connection) as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            names = [tool.name for tool in (await session.list_tools()).tools]
            result = await session.call_tool("bash", {"command": f"{SOLVE}; echo done"})
            return names, result.content[0].text

    with served(app) as url, httpx.Client(base_url=url, timeout=60) as agent:
        access = agent.post("/seed_session", json=typed_seed("s", {"task": TASK})).json()["resources_tools"]
        names, output = asyncio.run(episode(url, access))
        assert names == [tool.name for tool in blank("bash").tools]
        assert output.strip() == "done"
        for route in ("verify", "seed_session"):  # NeMo Gym replaced these routes
            assert f"no tool '{route}'" in agent.post(f"/{route}", json=row(EASY)).text
        assert verify(agent).json()["reward"] == 1.0


OWN_ROUTES = ("verify", "reset", "step", "seed_session", "close_session", "aggregate_metrics")


@pytest.mark.parametrize("route", OWN_ROUTES)
def test_a_models_call_of_a_route_is_answered_as_a_call_of_an_unknown_tool(route: str) -> None:
    """An agent sends requests to any route that the model names."""
    forged = row(EASY) | {"response": answer(), "verify_responses": []}
    with client() as agent:
        seed(agent)
        for body in ({}, forged, {"response": answer()}):
            told = agent.post(f"/{route}", json=body)
            assert (told.status_code, f"no tool '{route}'" in told.text) == (200, True), told.text
        agent.post("/bash", json={"command": SOLVE})
        assert verify(agent).json()["reward"] == 1.0
        assert agent.post("/bash", json={"command": SOLVE}).status_code == 422


@asynccontextmanager
async def nemo_gyms_client() -> AsyncIterator[None]:
    """The HTTP client of NeMo Gym's process; made on demand, it would parse pytest's command line."""
    session = server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    try:
        yield
    finally:
        await session.close()
        server_utils._GLOBAL_AIOHTTP_CLIENT = None


@contextmanager
def simple_agent(environment: str, turns: list[dict[str, Any]]) -> Iterator[str]:
    """NeMo Gym's simple_agent, unmodified, with a model that answers `turns` one after another."""
    model = FastAPI()

    @model.post("/v1/responses")
    async def respond() -> dict[str, Any]:
        return turns.pop(0)

    def place(kind: str, url: str) -> dict[str, Any]:
        address = httpx.URL(url)
        return {kind: {"main": {"host": address.host, "port": address.port}}}

    servers = OmegaConf.create({})
    config = SimpleAgentConfig(
        name="agent",
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        resources_server={"type": "resources_servers", "name": "environment"},
        model_server={"type": "responses_api_models", "name": "model"},
    )
    gym = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=0), global_config_dict=servers
    )
    agent = SimpleAgent(config=config, server_client=gym).setup_webserver()
    live_within(agent, nemo_gyms_client)
    with served(model) as model_url, served(agent) as agent_url:
        servers["model"] = place("responses_api_models", model_url)
        servers["environment"] = place("resources_servers", environment)
        servers["agent"] = place("responses_api_agents", agent_url)
        yield agent_url


@pytest.mark.parametrize("route", OWN_ROUTES)
def test_a_model_that_calls_a_route_of_the_server_through_simple_agent(route: str) -> None:
    forged = json.dumps(row(EASY) | {"response": answer(), "verify_responses": []})
    turns = [answer((route, "{}")), answer((route, forged)), answer(bash(SOLVE)), answer()]
    with serving() as url, simple_agent(url, turns) as agent:
        reply = httpx.post(f"{agent}/run", json=row(TASK), timeout=60)
        assert reply.status_code == 200, reply.text
        outputs = [
            item["output"]
            for item in reply.json()["response"]["output"]
            if item["type"] == "function_call_output"
        ]
        assert len(outputs) == 3
        assert all(f"no tool '{route}'" in output for output in outputs[:2]), outputs
        assert reply.json()["reward"] == 1.0


def test_a_bad_row_is_a_client_error_that_names_the_field() -> None:
    with client() as agent:
        reply = agent.post("/seed_session", json={})
        assert reply.status_code == 422
        assert "verifier_metadata.task" in reply.json()["error"]["message"]


BROKEN = TASK | {"setup": "exit 3"}


def test_an_internal_failure_is_an_http_error_if_masks_are_unsupported() -> None:
    with client(failures="error") as agent:
        reply = seed(agent, BROKEN)
        assert reply.status_code == 500
        assert reply.json()["error"]["kind"] == "prorl:environment"
        reply = verify(agent, BROKEN)
        assert reply.status_code == 500 and "reward" not in reply.json()


def test_an_internal_failure_is_masked_if_masks_are_supported() -> None:
    with client(failures="mask") as agent:
        assert seed(agent, BROKEN).status_code == 200
        told = agent.post("/bash", json={"command": "ls"})
        assert told.status_code >= 500 and "setup" not in told.text  # the reason is hidden from the model
        verdict = verify(agent, BROKEN).json()
        assert (verdict["mask_sample"], verdict["failure_kind"]) == (True, "prorl:environment")
        assert "setup failed" in verdict["failure_reason"]
        assert KNOWS_MASKS or verdict["_ng_failure_class"] == "prorl:environment"


def test_failures_are_masked_by_default_if_nemo_gym_supports_masks() -> None:
    with client() as agent:
        assert (seed(agent, BROKEN).status_code == 200) is KNOWS_MASKS


def test_a_verdict_without_a_session_has_no_reward() -> None:
    with client(failures="error") as agent:
        reply = verify(agent)
        assert (reply.status_code, reply.json()["error"]["kind"]) == (500, "session_lost")


def test_masked_samples_are_excluded_from_the_metrics() -> None:
    with client() as agent:
        base = {"_ng_task_index": 0, "mask_sample": False}
        good = base | {"_ng_rollout_index": 0, "reward": 1.0}
        masked = base | {"_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True}
        reply = agent.post("/aggregate_metrics", json={"verify_responses": [good, masked]})
        assert reply.json()["agent_metrics"]["mean/reward"] == 1.0


def step(agent: httpx.Client, *calls: tuple[str, str]) -> dict[str, Any]:
    reply = agent.post("/step", json=row(TASK) | {"response": answer(*calls)})
    reply.raise_for_status()
    body = reply.json()
    assert isinstance(body, dict)
    return body


def test_an_episode_can_be_stepped() -> None:
    with client() as agent:
        assert agent.post("/reset", json=row(TASK)).json()["observation"] is None
        first = step(agent, bash("echo one"), ("bash", "{"))
        outputs = first["info"]["tool_outputs"]
        assert [output["call_id"] for output in outputs] == ["c0", "c1"]
        assert outputs[0]["output"].strip() == "one" and "not valid JSON" in outputs[1]["output"]
        assert (first["reward"], first["terminated"], first["truncated"]) == (0.0, False, False)
        step(agent, bash(SOLVE))
        last = step(agent)
        assert (last["reward"], last["terminated"], last["truncated"]) == (1.0, True, False)
        assert last["info"]["evidence"]


def test_the_finishing_tool_ends_a_stepped_episode() -> None:
    with client() as agent:
        agent.post("/reset", json=row(TASK))
        last = step(agent, bash(SOLVE), ("finish", "{}"))
        assert (last["reward"], last["terminated"]) == (1.0, True)


def test_the_last_turn_is_graded_not_discarded() -> None:
    with client(max_turns=2) as agent:
        agent.post("/reset", json=row(TASK))
        step(agent, bash("ls"))
        last = step(agent, bash(SOLVE))
        assert (last["reward"], last["terminated"], last["truncated"]) == (1.0, False, True)


def test_open_episodes_are_closed_with_the_server() -> None:
    """The fixture that watches processes, mounts and directories makes the assertion."""
    with client() as agent:
        seed(agent)
        agent.post("/bash", json={"command": "sleep 1000 & disown"})


def test_more_than_one_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="one process"), serving(num_workers=2):
        pass
