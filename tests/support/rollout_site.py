"""Service with one model server, real sandboxes and a few scripted tasks. Its jobs run here, or on nodes."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.env.registry import environments
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.messages import Terms
from prorl_envs.rollout.nodes.worker import NodeResources, fingerprint
from prorl_envs.rollout.scheduling.placement import NodeRecord, StageLimits
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import ScriptBook
from tests.support.nodes import LocalNode
from tests.support.sandbox_entry import LIGHT_TEMPLATES
from tests.support.timed_server import TimedServer

#: A task that is solved only if the shell's variable and the file of the first turns are there later.
TASK = {
    "id": "total",
    "instruction": "Write the total of numbers.txt to total.txt.",
    "files": {"numbers.txt": "1\n2\n3\n"},
    "checks": [{"type": "file_equals", "path": "total.txt", "text": "6\n"}],
}
TURNS = [
    "cp numbers.txt copy.txt; rm numbers.txt",
    "total=0; while read n; do total=$((total + n)); done < copy.txt",
    "echo $total > total.txt",
]
BOOK = ScriptBook.from_tapes(
    {
        str(TASK["instruction"]): [
            *([{"tool": "bash", "arguments": {"command": command}}] for command in TURNS),
            [{"tool": "finish", "arguments": {}}],
        ],
        "Write hello to hi.txt.": [
            *(
                [{"tool": "bash", "arguments": {"command": command}}]
                for command in ("ls", "pwd", "touch hi.txt", "echo hello > hi.txt")
            ),
            [{"tool": "finish", "arguments": {}}],
        ],
        "Draw a number, then write 6 to total.txt.": [
            *(
                [{"tool": "bash", "arguments": {"command": command}}]
                for command in ("ls", "cat /proc/sys/kernel/random/uuid", "echo 6 > total.txt")
            ),
            [{"tool": "finish", "arguments": {}}],
        ],
    }
)


RANDOM_TASK = {**TASK, "id": "random", "instruction": "Draw a number, then write 6 to total.txt."}


@dataclass
class Site:
    """A running service, its model server, and its nodes in the same event loop."""

    client: RolloutClient
    server: TimedServer
    service: RolloutService
    drivers: list[BubblewrapDriver]
    nodes: dict[str, LocalNode]

    @staticmethod
    def group(name: str = "g", **fields: Any) -> GroupRequest:
        default = {"id": name, "environment": "bash", "task": TASK, "samples": 4, "branch_at": 2}
        return GroupRequest.model_validate(default | fields)

    async def run(self, name: str = "g", **fields: Any) -> list[Result]:
        await self.client.submit([self.group(name, **fields)])
        results = [result async for result in self.client.follow([name])]
        return sorted(results, key=lambda result: result.sample)

    @property
    def records(self) -> Collection[NodeRecord]:
        return self.service._engine.scheduler.nodes

    async def idle(self) -> None:
        """Wait until every sandbox is closed and every checkpoint freed."""
        while (await self.client.status()).unfinished:
            pass
        await self.service._engine.settled()
        assert (await self.client.status()).close_failures == 0
        left = [path for driver in self.drivers for path in driver.directory.path.glob("layer*")]
        assert not left, "files of a checkpoint"


@asynccontextmanager
async def running(
    renderer: TemplateRenderer,
    folder: Path,
    mix: str = "solve=1",
    nodes: Sequence[str] = (),
    attempts: int = 2,
    tokens_per_s: float | None = None,
    store: SqlStore | None = None,
    **families: Any,
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        drivers: list[BubblewrapDriver] = []

        async def node(name: str) -> Node:
            driver = BubblewrapDriver(templates=LIGHT_TEMPLATES)
            stack.push_async_callback(driver.aclose)
            drivers.append(driver)
            return Node(driver, folder / f"{name}-node")

        def connect(url: str) -> VllmClient:
            stop_ids, size = renderer.stop_ids, renderer.vocab_size
            limits = ClientLimits(attempts=1)
            return VllmClient(url, stop_ids=stop_ids, vocab_size=size, limits=limits)

        model_server = await stack.enter_async_context(
            TimedServer(BOOK, mix=mix, renderer=renderer, tokens_per_s=tokens_per_s)
        )
        pool = ModelPool(connect)
        stack.push_async_callback(pool.aclose)
        pool.add(model_server.url)
        bash = environments()["bash"]
        families |= {"bash": bash, "fixed": type("Fixed", (bash,), {"takes_checkpoints": False})}
        fleet = (
            Fleet(pool, Terms(environments=list(families), fingerprint=fingerprint(renderer)))
            if nodes
            else None
        )
        settings = ServiceSettings(init=2, run=3, eval=2, max_jobs_with_sandbox=3, attempts=attempts)
        service = RolloutService(await node("head"), families, renderer, pool, settings, store, fleet=fleet)
        client = await stack.enter_async_context(
            RolloutClient(await stack.enter_async_context(serving(service)))
        )
        site = Site(client, model_server, service, drivers, {})
        for name in nodes:
            assert fleet is not None
            prepared = NodeResources(await node(name), families, renderer, connect)
            limits = StageLimits(init=2, run=2, eval=2, max_jobs_with_sandbox=3)
            site.nodes[name] = LocalNode(fleet, prepared, name, limits)
        yield site
        if fleet is not None:
            await fleet.aclose()
