"""`prorl-envs node` in processes of their own, with real sandboxes: they join, work, die and leave."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from prorl_envs.app.compose import Model, rollout_service
from prorl_envs.app.nodes import token_of
from prorl_envs.app.processes import share
from prorl_envs.config import LimitSettings, NodeSettings, SandboxSection, ServiceSettings, Settings
from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import GroupRequest, Result, Stage
from prorl_envs.rollout.client.token_files import Address, read_token
from prorl_envs.rollout.nodes.channel import ChannelClosed, connect
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.filesystem.directories import sweep
from prorl_envs.testing.scripted import Mix, ScriptBook
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import tokenizer_folder

pytestmark = pytest.mark.anyio

TASK = {
    "id": "hello",
    "instruction": "Write hello to hello.txt.",
    "checks": [{"type": "file_equals", "path": "hello.txt", "text": "hello\n"}],
}
BOOK = ScriptBook.from_tapes(
    {
        TASK["instruction"]: [  # type: ignore[dict-item]
            [{"tool": "bash", "arguments": {"command": "echo hello >hello.txt; sleep 1"}}],
            [{"tool": "finish", "arguments": {}}],
        ]
    }
)
SERVICE = ServiceSettings(init=2, run=2, eval=2)
SCRIPT = Path(sys.executable).with_name("prorl-envs")


@asynccontextmanager
async def head(
    renderer: TemplateRenderer, folder: Path, nodes: NodeSettings | None = None
) -> AsyncIterator[tuple[RolloutService, int]]:
    """A service whose nodes have not joined yet, and the port for them."""
    tokenizer = tokenizer_folder(folder)
    settings = Settings(
        service=SERVICE,
        cache_dir=folder,
        sandbox=SandboxSection(warm_pool_size=0),
        nodes=nodes or NodeSettings(port=0),
        limits=LimitSettings(reserve_bytes=0),
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            ScriptedServer(BOOK, mix=Mix.parse("solve=1"), renderer=renderer)
        )
        model = Model(servers=[server.url], renderer=renderer, protocol="vllm", tokenizer=str(tokenizer))
        service = await stack.enter_async_context(rollout_service(settings, model))
        await service.start()
        try:
            assert service.fleet is not None
            yield service, service.fleet.port
        finally:
            await service.stop()
        assert server.counts.violations == 0


@asynccontextmanager
async def node(name: str, port: int, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a node in a process of its own and ask it to leave at the end. A killed node leaves files, so it
    has its own run directory."""
    run_dir = tempfile.mkdtemp(prefix="prn-")
    environ = {
        **os.environ,
        "PRORL_CACHE_DIR": str(folder),
        "PRORL_SANDBOX__WARM_POOL_SIZE": "0",
        "PRORL_RUN_DIR": str(run_dir),
        "PRORL_SERVICE__RUN": "2",
        "PRORL_SERVICE__DRAIN_S": "20",
        "PRORL_LIMITS__RESERVE_BYTES": "0",
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            SCRIPT, "node", f"127.0.0.1:{port}", "--name", name, env=environ, stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
        shutil.rmtree(run_dir)


async def results(service: RolloutService, count: int) -> list[Result]:
    found: list[Result] = []
    while len(found) < count:
        found += (await service.results(found[-1].cursor if found else 0, limit=count, wait_s=50)).results
    return found


async def until_ready(service: RolloutService, count: int) -> None:
    assert service.fleet is not None
    while sum(link.state == "ready" for link in service.fleet.links) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_nodes_work_and_a_killed_one_is_replaced(renderer: TemplateRenderer, tmp_path: Path) -> None:
    request = GroupRequest(id="g", environment="bash", task=TASK, samples=4)
    async with head(renderer, tmp_path) as (service, port):
        assert service.fleet is not None
        async with node("doomed", port, tmp_path) as doomed, node("other", port, tmp_path) as other:
            await until_ready(service, 2)
            await service.submit([request])
            [link] = [link for link in service.fleet.links if link.name == "doomed"]
            while not link.orders:  # noqa: ASYNC110 - until its jobs have started
                await asyncio.sleep(0.02)
            doomed.kill()
            found = await results(service, 4)
            assert [result.reward for result in found] == [1.0] * 4, [result.failure for result in found]
            assert max(result.attempts for result in found) == 2
            assert all(result.trajectory and result.trajectory.drift == 0 for result in found)
            await service.submit([request.model_copy(update={"id": "last", "samples": 1})])
            while not service.fleet._links["other"].orders:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            other.send_signal(signal.SIGTERM)  # it leaves in order, after its job
            assert [result.attempts for result in (await results(service, 5))[4:]] == [1]
            assert await other.wait() == 0
    assert "leaving when the jobs here are done" in (tmp_path / "other.log").read_text()


async def test_only_the_services_user_can_join_without_a_configured_token(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with head(renderer, tmp_path) as (_, port):
        known = read_token(Address("127.0.0.1", port), "nodes")
        assert known is not None and len(known) >= 32
        with pytest.raises(ChannelClosed):
            await connect("127.0.0.1", port, "loopback")
    assert read_token(Address("127.0.0.1", port), "nodes") is None
    with pytest.raises(ChannelClosed, match=f"no token for 127.0.0.1:{port}"):
        token_of(f"127.0.0.1:{port}")


@pytest.mark.thorough
async def test_local_processes_share_the_jobs_and_a_killed_one_is_replaced(
    renderer: TemplateRenderer, tmp_path: Path, run_dir: Path
) -> None:
    request = GroupRequest(id="g", environment="bash", task=TASK, samples=4)
    async with head(renderer, tmp_path, NodeSettings(processes=2)) as (service, _):
        assert service.fleet is not None
        await until_ready(service, 2)
        pools = [view.pools for view in service.fleet.views()]
        assert [pool and pool[Stage.RUN].limit for pool in pools] == [1, 1]
        await service.submit([request])
        links = list(service.fleet.links)
        while not all(link.orders and link.use for link in links):  # noqa: ASYNC110 - until both work
            await asyncio.sleep(0.02)
        pids = [int(link.use["pid"]) for link in links]
        assert os.getpid() not in pids and all(os.getpriority(os.PRIO_PROCESS, pid) == 10 for pid in pids)
        os.kill(pids[0], signal.SIGKILL)
        found = await results(service, 4)
        assert [result.reward for result in found] == [1.0] * 4, [result.failure for result in found]
        assert max(result.attempts for result in found) == 2
        await until_ready(service, 2)
        ready = [link for link in service.fleet.links if link.state == "ready"]
        assert len(ready) == 2 and links[1] in ready and links[0] not in ready
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert len(sweep(run_dir)) <= 1  # the folder of the killed process


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_processes_join_on_any_bound_address(
    renderer: TemplateRenderer, tmp_path: Path, host: str
) -> None:
    nodes = NodeSettings(processes=1, host=host, token=SecretStr("a token of sixteen characters"))
    async with head(renderer, tmp_path, nodes) as (service, _):
        await until_ready(service, 1)


async def test_processes_that_are_still_starting_stop_with_the_service(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with asyncio.timeout(30):  # half of the time a process gets before it is killed
        async with head(renderer, tmp_path, NodeSettings(processes=2)):
            pass


async def test_more_processes_than_episodes_are_refused(renderer: TemplateRenderer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 processes for 2 episodes at once"):
        async with head(renderer, tmp_path, NodeSettings(processes=3)):
            pass


def test_the_pools_are_divided_exactly() -> None:
    settings = Settings(
        service=ServiceSettings(init=3, run=10, eval=1, max_jobs_with_sandbox=11),
        sandbox=SandboxSection(warm_pool_size=5),
        nodes=NodeSettings(processes=4),
    )
    parts = [share(settings, index) for index in range(4)]
    assert [part.service.run for part in parts] == [3, 3, 2, 2]
    assert [part.service.max_jobs_with_sandbox for part in parts] == [3, 3, 3, 2]
    assert [part.service.init for part in parts] == [1, 1, 1, 1]  # none can do without
    assert [part.sandbox.warm_pool_size for part in parts] == [2, 1, 1, 1]
    assert not any(part.nodes.wanted for part in parts)
