"""Nodes as Ray actors, on a cluster of several Ray nodes on this machine: placed, restarted, lost."""

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.app.compose import Model, rollout_service
from prorl_envs.config import LimitSettings, NodeSettings, SandboxSection, ServiceSettings, Settings
from prorl_envs.extras import install_extras
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.leaks import OpenResources, leaks_since
from prorl_envs.testing.scripted import Mix, ScriptBook
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import builtin_renderer, tokenizer_folder

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
BOOK = ScriptBook.from_tapes(
    {
        TASK["instruction"]: [  # type: ignore[dict-item]
            [{"tool": "bash", "arguments": {"command": "echo hello >hello.txt; sleep 2"}}],
            [{"tool": "finish", "arguments": {}}],
        ]
    }
)
MEMORY = 80 << 20


@pytest.fixture(autouse=True)
def no_leaks(run_dir: Path) -> Iterator[None]:
    """The usual checks, except for descriptors: Ray keeps connections to dead actors."""
    before = OpenResources.now(run_dir)
    yield
    leaks = [leak for leak in leaks_since(before, run_dir) if not leak.startswith("descriptor")]
    assert not leaks, leaks


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Run a Ray cluster whose head accepts no work, and which tests must not shut down."""
    os.environ |= {
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
        service=ServiceSettings(init=2, run=4, eval=2),
        cache_dir=tmp_path,
        sandbox=SandboxSection(warm_pool_size=0),
        limits=LimitSettings(reserve_bytes=0),
        nodes=NodeSettings(ray=cluster.address, resource="prorl"),
    )
    async with ScriptedServer(BOOK, mix=Mix.parse("solve=1"), renderer=renderer) as server:
        model = Model(servers=[server.url], renderer=renderer, protocol="vllm", tokenizer=str(tokenizer))
        async with rollout_service(settings, model) as made:
            await made.start()
            yield made
            await made.stop()


def ready(service: RolloutService) -> list[Any]:
    assert service.fleet is not None
    return [link for link in service.fleet.links if link.state == "ready"]


async def until(holds: Callable[[], object]) -> None:
    """Return once the condition holds. The test's own timeout bounds this."""
    while not holds():  # noqa: ASYNC110 - other processes have no event
        await asyncio.sleep(0.05)


async def results(service: RolloutService, count: int) -> list[Result]:
    found: list[Result] = []
    while len(found) < count:
        found += (await service.results(found[-1].cursor if found else 0, limit=count, wait_s=50)).results
    return found


async def test_machines_of_a_cluster_are_nodes_while_they_exist(
    cluster: Any, service: RolloutService
) -> None:
    await until(lambda: ready(service))
    [first] = ready(service)
    assert (first.ready.run, first.ready.max_jobs_with_sandbox) == (2, 4), (
        "as much as the machine offers of its resource"
    )
    await service.submit([GroupRequest(id="a", environment="bash", task=TASK, samples=2)])
    assert [result.reward for result in await results(service, 2)] == [1.0, 1.0]

    # A machine joins late and gets a job; it is lost with the job, which is repeated on the other.
    late = cluster.add_node(num_cpus=2, resources={"prorl": 2}, object_store_memory=MEMORY)
    await until(lambda: len(ready(service)) == 2)
    await service.submit([GroupRequest(id="b", environment="bash", task=TASK, samples=6)])
    [other] = [link for link in ready(service) if link is not first]
    await until(lambda: len(other.orders) >= 2)
    cluster.remove_node(late, allow_graceful=False)
    found = (await results(service, 8))[2:]
    assert [result.reward for result in found] == [1.0] * 6, [result.failure for result in found]
    assert max(result.attempts for result in found) == 2
    assert other.state == "lost"

    # Only the process of a node dies: Ray restarts it, and it joins again.
    pid = int(first.use["pid"])
    os.kill(pid, signal.SIGKILL)
    await until(lambda: first.state == "lost" and ready(service))
    [again] = ready(service)
    assert again.name == f"{first.name}~2"
    await service.submit([GroupRequest(id="c", environment="bash", task=TASK)])
    assert (await results(service, 9))[-1].reward == 1.0
