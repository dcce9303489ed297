"""Identity of rollouts: a repeated request gets the result of the first one, and runs nothing again."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from prorl_envs.env.registry import example_path
from prorl_envs.nemo.rollouts import attempt_id
from prorl_envs.nemo.rows import blank, nemo_row
from prorl_envs.nemo.wire import KNOWS_MASKS
from tests.nemo.conftest import SERVICE_TOKEN, background, command, free_port
from tests.nemo.gym import SITE
from tests.nemo.test_agent import serving

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(300), pytest.mark.usefixtures("loops_own_pipe")]

HEADERS = {"Authorization": f"Bearer {SERVICE_TOKEN}"}
#: Folders of the servers that run rollouts; environment servers exist since 0.7.
SERVERS = ["responses_api_agents/prorl_agent"] + ["environment_servers/prorl_rollouts"] * KNOWS_MASKS


def row(index: int = 0, **ids: Any) -> dict[str, Any]:
    """Return a row as NeMo Gym's collector sends it."""
    task = json.loads(example_path("bash").read_text().splitlines()[index])
    return nemo_row(blank("bash"), task) | {"_ng_task_index": index, "_ng_rollout_index": 0} | ids


@dataclass
class World:
    """A service with a durable store and a server of NeMo Gym, each a process that can be killed."""

    server: str
    folder: Path
    model: list[str]
    stack: ExitStack
    ports: dict[str, str] = field(default_factory=lambda: {"service": free_port(), "server": free_port()})
    processes: dict[str, Any] = field(default_factory=dict)

    def start(self, part: str) -> None:
        self.processes[part], _ = self.stack.enter_context(getattr(self, f"_{part}")())

    def kill(self, part: str, with_signal: int = signal.SIGKILL) -> None:
        self.processes[part].send_signal(with_signal)
        self.processes[part].wait()

    def url(self, part: str) -> str:
        return f"http://127.0.0.1:{self.ports[part]}"

    def request(self, method: str, path: str, **options: Any) -> Any:
        """Send a request to the service."""
        answer = httpx.request(method, self.url("service") + path, headers=HEADERS, timeout=60, **options)
        return answer.raise_for_status().json()

    def run(self, timeout: float = 120.0) -> dict[str, Any]:
        answer = httpx.post(f"{self.url('server')}/run", json=row(), timeout=timeout)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        del found["response"]["created_at"]  # time of the answer
        return found

    def model_requests(self) -> int:
        url = self.model[self.model.index("--llm") + 1].removesuffix("/v1")
        name, _, value = httpx.get(f"{url}/metrics").text.splitlines()[-1].partition(" ")
        assert name == "scripted:requests_total"
        return int(value)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _service(self) -> AbstractContextManager[Any]:
        arguments = [
            "serve",
            *self.model,
            "--port",
            self.ports["service"],
            "--store",
            str(self.folder / "db"),
        ]
        environ = {"PRORL_RUN_DIR": str(self.folder), "PRORL_SERVER__TOKEN": SERVICE_TOKEN}
        script = str(Path(sys.executable).with_name("prorl-envs"))
        return background("Ctrl-C stops it", script, *arguments, **environ)

    def _server(self) -> AbstractContextManager[Any]:
        kind, name = self.server.split("/")
        block: dict[str, Any] = {
            "entrypoint": "app.py",
            "host": "127.0.0.1",
            "port": int(self.ports["server"]),
        }
        block |= {"service": self.url("service"), "environment": "bash", "run_id": "tried"}
        if kind == "environment_servers":
            block |= {"cleanup_timeout_seconds": 10}
        config = {
            name: {kind: {name: block}},
            "head_server": {"host": "127.0.0.1", "port": 1},
            "dry_run": False,
        }
        environ = {"NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": name}
        environ |= {"PRORL_SERVER__TOKEN": SERVICE_TOKEN}
        app = str(SITE / self.server / "app.py")
        return background("Uvicorn running", sys.executable, app, **environ)


@pytest.fixture(scope="module")
def model() -> Iterator[list[str]]:
    """Options of a scripted model server."""
    with command("--llm", "scripted-model", "bash", "--mix", "solve=1") as options:
        yield options.split()


@pytest.fixture
def world(request: pytest.FixtureRequest, model: list[str], tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        world = World(request.param, tmp_path, model, stack)
        world.start("service")
        world.start("server")
        yield world


@pytest.mark.parametrize("broken", ["connection", "server", "stopped server", "service"])
@pytest.mark.parametrize("world", SERVERS, indirect=True, ids=lambda server: server.rpartition("/")[2])
def test_a_repeated_request_gets_the_first_ones_result(world: World, broken: str) -> None:
    before = world.model_requests()
    world.request("POST", "/v1/model_servers/pause", json={"mode": "finish"})
    with ThreadPoolExecutor() as pool:
        first: Future[dict[str, Any]] = pool.submit(world.run, 3.0 if broken == "connection" else 120.0)
        world.until(lambda: world.request("GET", "/v1/jobs", params={"state": "run"})["total"])
        if broken == "connection":
            assert isinstance(first.exception(), httpx.ReadTimeout)
        elif broken == "stopped server":
            world.kill("server", signal.SIGTERM)
            world.start("server")
        else:
            world.kill(broken)
            world.start(broken)
        second = pool.submit(world.run)
        if "server" in broken:
            assert first.exception() is not None
        if broken != "service":  # a restarted service does not pause
            world.request("POST", "/v1/model_servers/resume", json={})
        found = second.result()
        if broken == "service":
            assert first.result() == found, "the first request outlived the service"
    assert found["reward"] == 1.0 and not found["mask_sample"]
    assert world.run() == found
    (result,) = world.request("GET", "/v1/results")["results"]
    assert result["attempts"] == 1 or broken == "service"
    calls = [item for item in found["response"]["output"] if "generation_token_ids" in item]
    probes = 1 if broken == "service" else 0  # of the model server, at the start of a service
    assert world.model_requests() - before - probes == len(calls), "each turn was sampled once"


def test_the_run_the_attempt_and_the_request_tell_rollouts_apart(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    hotter = row(1)
    hotter["responses_create_params"] |= {"temperature": 0.5}
    ids = []
    for run_id in ("one", "two"):
        with serving(service, run_id=run_id) as agent:
            for asked in (row(1), row(1), row(1, _ng_attempt_index=1), row(1, _ng_rollout_id="mine"), hotter):
                answer = agent.post("/run", json=asked).json()
                assert answer["reward"] == 1.0
                ids.append(answer["response"]["id"])
    assert ids[0] == ids[1] and ids[5] == ids[6]
    assert len(set(ids)) == len(ids) - 2


def test_a_cancelled_rollout_is_run_again(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SERVER__TOKEN", SERVICE_TOKEN)
    asked = row(2)
    asked["verifier_metadata"]["task"]["setup"] = "sleep 2"
    with serving(service, run_id="cancelled", timeout_s=1.0, failures="mask") as agent:
        cancelled = agent.post("/run", json=asked).json()
        assert (cancelled["mask_sample"], cancelled["failure_kind"]) == (True, "cancelled")
    with serving(service, run_id="cancelled") as agent:
        again = agent.post("/run", json=asked).json()
    assert again["reward"] == 1.0 and again["response"]["id"] != cancelled["response"]["id"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"_ng_task_index": 3, "_ng_rollout_index": 0}, "3-0"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_attempt_index": 2}, "3-0-a2"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 0, "_ng_rollout_id": "step7.4"}, "step7.4"),
        ({"_ng_rollout_id": "x", "_ng_attempt_index": 1}, "x-a1"),
        ({"_ng_attempt_index": 1}, None),
        ({}, None),
    ],
)
def test_the_id_of_an_attempt_is_that_of_nemo_gym(ids: dict[str, Any], expected: str | None) -> None:
    assert attempt_id(ids) == expected
    if KNOWS_MASKS:
        from nemo_gym.rollout_correlation import maybe_rollout_id_from_run_body

        assert maybe_rollout_id_from_run_body(ids) == expected
