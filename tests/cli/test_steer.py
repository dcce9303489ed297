"""Commands that inspect and change a running service; the service runs in a thread."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.cli.conftest import Done, FastCli
from tests.support.toy import ToyModel, ToyWorld, empty_node


class Steered:
    """A service in a thread, whose tool calls wait for a gate."""

    def __init__(self, server: ServerSettings | None = None) -> None:
        self._server = server
        self.loop = asyncio.new_event_loop()
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self._live()), name="steered"
        )
        self._thread.start()
        self._ready.wait()

    async def _live(self) -> None:
        self.world = ToyWorld()
        self.world.gates["call"] = asyncio.Event()
        renderer = builtin_renderer()
        pool = ModelPool(lambda _: ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}]))
        pool.add("http://127.0.0.1:8000")
        settings = ServiceSettings(run=2, max_jobs_with_sandbox=4)
        self.service = RolloutService(empty_node(), {"toy": self.world.family()}, renderer, pool, settings)
        async with serving(self.service, self._server) as self.url:
            self._ready.set()
            await self._over.wait()

    def end(self) -> None:
        self.open()
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self.loop.close()

    def do[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def open(self) -> None:
        self.loop.call_soon_threadsafe(self.world.gates["call"].set)

    def inside(self, count: int) -> None:
        self.do(self.world.until(lambda: self.world.inside["call"] == count))

    def submit(self, name: str, samples: int) -> None:
        row = {"id": "t", "instruction": "Do."}
        self.do(
            self.service.groups.submit([GroupRequest(id=name, environment="toy", task=row, samples=samples)])
        )
        self.inside(2)


type Steer = Callable[..., Done]


@pytest.fixture
def steered() -> Iterator[Steered]:
    bench = Steered()
    yield bench
    bench.end()


@pytest.fixture
def steer(steered: Steered, fast_cli: FastCli) -> Steer:
    """Run a command against that service, in this process."""

    def run(*arguments: str, service: str = steered.url) -> Done:
        return fast_cli(*arguments, "--service", service)

    return run


def test_jobs_are_listed_cancelled_and_repeated(steered: Steered, steer: Steer) -> None:
    steered.submit("step1/g", 4)
    listed = steer("jobs")
    assert listed.code == 0 and "step1/g/0" in listed.out and "for run" in listed.out, listed.err
    found = json.loads(steer("jobs", "--state", "run", "--json").out)
    assert {job["id"] for job in found["jobs"]} == {f"step1/g/{n}" for n in range(4)}
    done = steer("cancel", "step1/g/0", "step1/g/2", "--json")
    assert [job["state"] for job in json.loads(done.out)] == ["cancelled"] * 2
    missing = steer("cancel", "nothing")
    assert missing.code == 2 and "hint: prorl-envs jobs" in missing.err
    early = steer("retry", "step1/g/1")
    assert early.code == 2 and "cancel it first" in early.err
    assert steer("retry", "step1/g/0").out == "step1/g:retry-0\n"
    assert steer("cancel", "step1/g").code == 0
    assert steered.do(steered.service.groups.group("step1/g")).complete
    wrong = steer("jobs", "--state", "done")
    assert wrong.code == 2 and "queued, init, run or eval" in wrong.err


def test_results_are_acknowledged(steered: Steered, steer: Steer) -> None:
    def unread() -> list[str]:
        lines = httpx.get(f"{steered.url}/metrics", headers=headers).text.splitlines()
        return [line for line in lines if line.startswith("prorl_unread_results ")]

    headers = {"Authorization": f"Bearer {steer('token').out.strip()}"}
    for name in ("a", "b", "c"):
        steered.submit(name, 2)
        assert steer("cancel", name).code == 0
    assert unread() == ["prorl_unread_results 6.0"]
    for wrong in ((), ("a", "--all")):
        done = steer("acknowledge", *wrong)
        assert done.code == 2 and "which results?" in done.err and "--all" in done.err
    assert "done, failed or cancelled" in steer("acknowledge", "--state", "run").err
    steps = ((("a",), 4), (("--state", "done"), 4), (("b", "--state", "cancelled"), 2), (("--all",), 0))
    for arguments, left in steps:
        assert steer("acknowledge", *arguments).code == 0
        steered.do(steered.service.store.put_value("flush", ""))  # the acknowledgements before it are stored
        assert unread() == [f"prorl_unread_results {left}.0"], arguments


def test_a_service_is_paused_drained_and_bounded(steered: Steered, steer: Steer) -> None:
    steered.submit("g", 3)
    assert "paused: hold" in steer("pause", "--mode", "hold").err
    assert "paused: hold" in steer("status").out
    assert steer("resume").code == 0
    raised = json.loads(steer("limits", "--run", "3", "--json").out)
    assert raised["pools"]["run"]["limit"] == 3
    steered.inside(3)
    left = steer("drain", "--wait", "0.1")
    assert (left.code, left.err) == (1, "draining, 3 unfinished\n")
    steered.open()
    assert steer("drain", "--wait", "60").code == 0


def test_servers_are_added_and_removed(steered: Steered, steer: Steer) -> None:
    assert "http://127.0.0.1:8001" in steer("servers", "add", "http://127.0.0.1:8001/v1").out
    gone = json.loads(steer("servers", "drain", "http://127.0.0.1:8001", "--json").out)
    assert [server["url"] for server in gone] == ["http://127.0.0.1:8000"]
    listed = steer("servers", "list")
    assert listed.code == 0 and "http://127.0.0.1:8000" in listed.out, listed.err
    assert json.loads(steer("servers", "list", "--json").out) == gone
    assert json.loads(steer("nodes", "list", "--json").out) == []
    assert "node" in steer("nodes", "list").out
    missing = steer("nodes", "drain", "gpu17")
    assert missing.code == 2 and "has no nodes" in missing.err


def test_the_token_is_read_from_the_settings(steer: Steer, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = Steered(ServerSettings(port=0, token=SecretStr("a-token-of-sixteen")))
    try:
        refused = steer("status", service=locked.url)
        assert refused.code == 2 and "hint: set PRORL_SERVER__TOKEN" in refused.err
        monkeypatch.setenv("PRORL_SERVER__TOKEN", "a-token-of-sixteen")
        assert steer("status", service=locked.url).code == 0
    finally:
        locked.end()


def test_an_absent_service_is_one_clear_error(steer: Steer) -> None:
    away = steer("status", service="http://127.0.0.1:9")
    assert away.code == 2 and "does not answer" in away.err and "is it at another address?" in away.err
    wrong = steer("status", service="localhost")
    assert wrong.code == 2 and "is not the URL" in wrong.err
