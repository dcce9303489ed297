"""Nodes as Ray actors on a cluster of several Ray nodes on this machine."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.app.compose import Model
from prorl_envs.app.service import rollout_service
from prorl_envs.config import LimitSettings, NodeSettings, SandboxSection, ServiceSettings, Settings
from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.api.interactive import CallRequest, CallStep, EpisodeRequest, EpisodeState
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.filesystem.directories import sweep
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer, tokenizer_folder
from tests.support.leaks import OpenResources, leaks_since
from tests.support.timed_server import TimedServer
from tests.support.vllm_server import free_port

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=install_extras("ray")),
    # Ray leaves sockets and a log file to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TASK = {
    "id": "hello",
    "instruction": "Write hello to hello.txt.",
    "checks": [{"type": "file_equals", "path": "hello.txt", "text": "hello\n"}],
}
PLAYED: list[list[dict[str, Any]]] = [
    [{"tool": "bash", "arguments": {"command": "echo hello >hello.txt; sleep 2"}}],
    [{"tool": "finish", "arguments": {}}],
]
BOOK = ScriptBook.from_tapes({TASK["instruction"]: PLAYED})  # type: ignore[dict-item]
MEMORY = 80 << 20


@pytest.fixture(autouse=True)
def no_leaks(run_dir: Path) -> Iterator[None]:
    """The usual checks, except for descriptors: Ray keeps connections to dead actors."""
    before = OpenResources.now(run_dir)
    yield
    sweep(run_dir)  # folders of killed processes, as the next one does
    leaks = [leak for leak in leaks_since(before, run_dir) if not leak.startswith("descriptor")]
    assert not leaks, leaks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Run a Ray cluster whose head accepts no work. Tests must not shut the cluster down."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-of-this-test-" * 2,
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its processes may be slow to start on a busy machine.
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_gcs_server_request_timeout_seconds": "60",
    }
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    made.add_node(num_cpus=2, resources={"prorl": 2}, object_store_memory=MEMORY)
    ray.init(made.address, namespace="prorl-envs", log_to_driver=False)  # keeps its log files open forever
    ray.get(ray.remote(lambda: 0).remote())
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
async def service(cluster: Any, tmp_path: Path) -> AsyncIterator[RolloutService]:
    """Run a service whose nodes are the cluster's nodes with the resource `prorl`."""
    renderer, tokenizer = builtin_renderer(), tokenizer_folder(tmp_path)
    settings = Settings(
        service=ServiceSettings(init=2, run=4, eval=2, attempts=2),
        cache_dir=tmp_path,
        sandbox=SandboxSection(warm_pool_size=0),
        limits=LimitSettings(reserve_bytes=0),
        nodes=NodeSettings(ray=cluster.address, resource="prorl"),
    )
    async with TimedServer(BOOK, mix="solve=1", renderer=renderer) as server:
        model = Model(servers=[server.url], renderer=renderer, protocol="vllm", tokenizer=str(tokenizer))
        async with rollout_service(settings, model) as made:
            await made.start()
            yield made
            await made.stop()


def ready(service: RolloutService) -> list[Any]:
    assert service.fleet is not None
    return [node for node in service.fleet.nodes if node.state == "ready"]


async def until(holds: Callable[[], object]) -> None:
    """Wait until the condition holds. The test's own timeout limits the wait."""
    while not holds():  # noqa: ASYNC110 - other processes have no event
        await asyncio.sleep(0.05)


async def results(service: RolloutService, count: int) -> list[Result]:
    found: list[Result] = []
    while len(found) < count:
        found += (await service.feed.page(found[-1].cursor if found else 0, limit=count, wait_s=50)).results
    return found


async def submit(service: RolloutService, name: str, samples: int) -> None:
    await service.groups.submit([GroupRequest(id=name, environment="bash", task=TASK, samples=samples)])


async def test_machines_of_a_cluster_are_nodes_while_they_exist(
    cluster: Any, service: RolloutService
) -> None:
    await until(lambda: ready(service))
    [first] = ready(service)
    assert (first.info.limits.run, first.info.limits.max_jobs_with_sandbox) == (2, 4), (
        "as much as the machine offers of its resource"
    )
    await submit(service, "a", 2)
    assert [result.reward for result in await results(service, 2)] == [1.0, 1.0]

    # A machine joins late and gets a job; it is lost with the job, which is repeated on the other.
    late = cluster.add_node(num_cpus=2, resources={"prorl": 2}, object_store_memory=MEMORY)
    await until(lambda: len(ready(service)) == 2)
    await submit(service, "b", 6)
    [other] = [node for node in ready(service) if node is not first]
    await until(lambda: len(other.orders) >= 2)
    cluster.remove_node(late, allow_graceful=False)
    found = (await results(service, 8))[2:]
    assert [result.reward for result in found] == [1.0] * 6, [result.failure for result in found]
    assert max(result.attempts for result in found) == 2
    assert other.state == "lost"

    # A drained node finishes its jobs and gets no more.
    assert service.fleet is not None
    service.fleet.drain(first.name)
    await submit(service, "c", 1)
    await asyncio.sleep(1)
    assert not first.orders and first.state == "draining"
    service.fleet.undrain(first.name)
    assert [result.reward for result in (await results(service, 9))[8:]] == [1.0]


async def test_turns_wait_for_new_weights_on_every_node(service: RolloutService) -> None:
    await until(lambda: ready(service))
    pool = service.model
    assert isinstance(pool, ModelPool)
    await pool.pause("finish", wait_s=30)
    await submit(service, "a", 2)
    await asyncio.sleep(4)
    assert service.status().router.turns == 0  # type: ignore[union-attr]
    await pool.resume("2")
    found = await results(service, 2)
    assert [result.reward for result in found] == [1.0] * 2
    assert all(result.timings.held_s > 1 for result in found)


async def test_an_episode_is_driven_step_by_step_on_a_node(service: RolloutService) -> None:
    await until(lambda: ready(service))
    [node] = ready(service)
    episodes = service.episodes
    view = await service.start_episode(EpisodeRequest(id="e", environment="bash", task=TASK), wait_s=60)
    assert view.state is EpisodeState.READY, view.failure
    assert len(node.orders) == 1
    calls = [turn[0] for turn in PLAYED]
    for call in calls:
        step = CallStep(tool_calls=[CallRequest(name=call["tool"], arguments=call["arguments"])])
        view = await episodes.step("e", step, wait_s=60)
        assert view.failure is None and view.last is not None
    assert view.state is EpisodeState.STOPPED
    view = await episodes.evaluate("e", wait_s=60)
    assert view.result is not None and view.result.reward == 1.0
    await episodes.close("e")
    assert not node.orders


def working(node: Any) -> bool:
    return len(node.orders) >= 2


def lost(node: Any) -> bool:
    return bool(node.lost)


KILLS = int(os.environ.get("RAY_KILLS", "3"))


async def test_no_job_is_lost_or_doubled_when_actors_are_killed(service: RolloutService) -> None:
    """`RAY_KILLS` sets the number of kills."""
    ids: list[str] = []
    for kill in range(KILLS):
        await until(lambda: [node for node in ready(service) if node.usage])
        [node] = ready(service)
        await submit(service, f"g{kill}", 3)
        ids += [f"g{kill}/{sample}" for sample in range(3)]
        await until(partial(working, node))
        await asyncio.sleep(kill % 5 * 0.5)  # in other stages
        os.kill(int(node.usage["pid"]), signal.SIGKILL)
        await until(partial(lost, node))
        found = await results(service, len(ids))
    assert sorted(result.job_id for result in found) == sorted(ids)
    assert [result.reward for result in found] == [1.0] * len(ids), [result.failure for result in found]
    assert 1 < max(result.attempts for result in found) <= 2
    await until(lambda: service.status().unfinished == 0)  # the last sandbox is closed after its result
    assert len({node.name for node in service.fleet.nodes}) == len(service.fleet.nodes)  # type: ignore[union-attr]


def test_a_cluster_without_token_authentication_is_refused(cluster: Any) -> None:
    from prorl_envs.app.ray import require_authentication

    require_authentication(cluster.address)
    require_authentication("127.0.0.1:6379")  # no other machine reaches it
    host, port = cluster.address.rpartition(":")[0], free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # the path of its sockets has to be short
        start = ["start", "--head", "--block", f"--node-ip-address={host}", f"--port={port}", "--num-cpus=0"]
        unlocked = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", *start, f"--temp-dir={folder}"),
                *("--include-dashboard=false", f"--object-store-memory={MEMORY}"),
            ],
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdout=subprocess.DEVNULL,
        )
        try:
            with pytest.raises(InputError, match="no token authentication"):
                while unlocked.poll() is None:  # until it has started
                    require_authentication(f"{host}:{port}")
        finally:
            unlocked.terminate()
            unlocked.wait()
