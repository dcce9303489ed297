"""Throughput of a service by number of nodes, and load of the head (figure 6).

python -m bench.scale                          # 1 to 8 nodes, a minute
python -m bench.scale --nodes 8,64,256 --run 8 # more machines with fewer episodes each

The service is the real one, with its scheduler, store in memory, router and fleet; so are each node's worker
and agent loop. Calls in one process replace Ray (arguments and results are pickled), so the cost of calls of
Ray actors must be added; the last line of the output has this cost if Ray is installed. The model servers
(one per node; they slow down with the number of requests in flight), the sandboxes (they wait) and time are
simulated. Simulated time skips all waiting, and advances while the head computes, so an overloaded head
reduces the throughput. The nodes' computation takes no simulated time, because real nodes are other machines.
`bench.durable_store` measures the cost of a durable store.
"""

import argparse
import asyncio
import contextvars
import gc
import importlib.util
import itertools
import random
import selectors
import time
from asyncio import events
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from bench.__main__ import machine
from prorl_envs.clock import SystemClock
from prorl_envs.config import RetentionSettings, ServiceSettings
from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import AssistantTurn, Sampled, Sampling
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.messages import Terms
from prorl_envs.rollout.nodes.worker import NodeResources, fingerprint
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec
from tests.support.nodes import LocalNode
from tests.support.toy import empty_node

#: Seconds per sampled token on an idle server, and the increase per turn in flight.
DECODE_S, DECODE_SHARE_S = 0.015, 0.0004
# Median numbers of tokens in a turn, its tool results, and a prompt. Lengths and the number of turns are
# log-normal.
SAMPLED, OBSERVED, PROMPT = 200, 300, 1500
TURNS = 10
INIT_S, TOOL_S, EVAL_S = 1.0, 1.5, 5.0
SAMPLES = 8

_SEEDS = itertools.count()
#: Side that the running callback belongs to: "head" or "node".
SIDE: contextvars.ContextVar[str] = contextvars.ContextVar("side", default="head")


class SkippingLoop(asyncio.SelectorEventLoop):
    """Event loop that never waits. Its time is the skipped waiting time plus the head's processor time."""

    def __init__(self) -> None:
        self.skipped = 0.0
        self.head_s = self.node_s = 0.0
        super().__init__(_SkippingSelector(self))

    def time(self) -> float:
        return self.skipped + self.head_s


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout:
            self._loop.skipped += timeout
        return found


class LoopClock(SystemClock):
    """Clock with the event loop's time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


@contextmanager
def computing_counted(loop: SkippingLoop) -> Iterator[None]:
    """Measure the processor time of each callback in the block, and add it to the callback's side."""
    handles: Any = events.Handle
    ordinary = handles._run

    def run(handle: Any) -> None:
        began = time.thread_time()
        ordinary(handle)
        if handle._context.get(SIDE, "head") == "head":
            loop.head_s += time.thread_time() - began
        else:
            loop.node_s += time.thread_time() - began

    handles._run = run
    try:
        yield
    finally:
        handles._run = ordinary


class WaitingEnvironment(Environment[Task]):
    """Environment without a sandbox that only waits."""

    name: ClassVar[str] = "waiting"
    task_type = Task

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> Task:
        return Task.model_validate(row)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec("act", "Act.", {"type": "object"})]

    async def init(self, task: Task) -> Prompt:
        self._chance = random.Random(next(_SEEDS))
        await asyncio.sleep(INIT_S * self._chance.lognormvariate(0, 0.3))
        return self.prompt(task)

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        await asyncio.sleep(TOOL_S * self._chance.lognormvariate(0, 0.8))
        return ToolResult(text="done " * 50)

    async def eval(self) -> Grade:
        await asyncio.sleep(EVAL_S * self._chance.lognormvariate(0, 0.5))
        return Grade(reward=float(self._chance.random() < 0.5))

    async def close(self) -> None:
        """Do nothing, because there is no sandbox."""


class ShortRenderer:
    """Renderer without a tokenizer. Tokenizing would be work of the nodes, which is not measured."""

    stop_ids: tuple[int, ...] = (1,)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        return [7] * PROMPT

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), *, prompt_ids: Sequence[int] | None = None
    ) -> AssistantTurn:
        calls = () if ids[-1] == 1 else (ToolCall(id="c", name="act", arguments={}),)
        return AssistantTurn(content="I act.", tool_calls=calls, malformed=())

    def bridge(self, sampled: Sampled, observations: Sequence[Message]) -> list[int]:
        return [9] * OBSERVED

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "text"

    @property
    def tool_format(self) -> str:
        return "hermes"

    def assistant(self, message: Mapping[str, Any]) -> list[int]:
        return [5] * SAMPLED


class ModelServer:
    """Simulated model server. The time of a turn depends on the number of turns in flight."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._in_flight = 0
        self.sampled = 0
        self._remaining_turns: dict[str, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        remaining = self._remaining_turns.pop(session, None)
        if remaining is None:
            remaining = max(1, round(TURNS * self._chance.lognormvariate(0, 0.5)))
        tokens = max(20, round(SAMPLED * self._chance.lognormvariate(0, 0.6)))
        self._in_flight += 1
        try:
            await asyncio.sleep(tokens * (DECODE_S + DECODE_SHARE_S * self._in_flight))
        finally:
            self._in_flight -= 1
        if remaining > 1:
            self._remaining_turns[session] = remaining - 1
        self.sampled += tokens
        ids = (5,) * (tokens - 1) + ((1,) if remaining == 1 else (5,))
        return Sampled(ids, (-0.5,) * tokens, "stop", "1", "simulated", cached_tokens=len(prompt_ids))

    async def aclose(self) -> None:
        """Do nothing, because there is no connection."""


@dataclass(slots=True)
class Row:
    """Results for one number of nodes.

    Args:
        nodes: number of nodes.
        rate: episodes per second of simulated time, while all nodes are full.
        tokens: sampled tokens per second of simulated time; less random than `rate`.
        head_s: processor seconds of the head per episode.
        node_s: processor seconds of all nodes per episode.
        load: load of the head at this rate, in cores.
        calls: number of calls between head and nodes per episode.
        bytes: size of the arguments and results of these calls.
        spread: largest number of turns in flight on a server divided by the mean, in the middle of the
            measurement.
    """

    nodes: int
    rate: float = 0.0
    tokens: float = 0.0
    head_s: float = 0.0
    node_s: float = 0.0
    load: float = 0.0
    calls: float = 0.0
    bytes: float = 0.0
    spread: float = 0.0


@asynccontextmanager
async def site(
    count: int, run: int
) -> AsyncIterator[tuple[RolloutService, list[ModelServer], list[LocalNode]]]:
    """Run a service with `count` nodes and as many model servers, and `run` jobs in RUN per node."""
    clock, renderer = LoopClock(), cast(TemplateRenderer, ShortRenderer())
    servers = {f"http://server{number}:8000": ModelServer(number) for number in range(count)}
    pool = ModelPool(servers.__getitem__, clock=clock)
    for url in servers:
        pool.add(url)
    terms = Terms(environments=["waiting"], fingerprint=fingerprint(renderer))
    fleet = Fleet(pool, terms, clock)
    families: Any = {"waiting": WaitingEnvironment}
    settings = ServiceSettings(queue=10_000_000, retention=RetentionSettings(max_tokens=2_000_000))
    service = RolloutService(empty_node(), families, renderer, pool, settings, clock=clock, fleet=fleet)
    prepared = NodeResources(empty_node(), families, renderer, servers.__getitem__)

    node_side = contextvars.copy_context()
    node_side.run(SIDE.set, "node")
    limits = StageLimits(
        init=max(2, run // 4), run=run, eval=max(2, run // 4), max_jobs_with_sandbox=run + run // 2
    )

    await service.start()
    nodes = [
        node_side.run(LocalNode, fleet, prepared, f"node{number}", limits, clock) for number in range(count)
    ]
    while len(fleet.nodes) < count:
        await asyncio.sleep(0)
    try:
        yield service, list(servers.values()), nodes
    finally:
        await service.stop()
        await fleet.aclose()
        await pool.aclose()


def groups(first: int, count: int) -> list[GroupRequest]:
    return [
        GroupRequest(
            id=f"g{number}",
            environment="waiting",
            task={"id": f"t{number}", "instruction": "Do what has to be done. " * 50},
            samples=SAMPLES,
            limits=AgentLimits(max_turns=200, max_tokens=1_000_000, run_s=36_000),
        )
        for number in range(first, first + count)
    ]


async def measure(count: int, run: int, episodes: int) -> Row:
    """Measure `episodes` episodes while all nodes are full."""
    row, at_once = Row(count), count * run
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    with computing_counted(loop):
        async with site(count, run) as (service, servers, nodes):
            # There are enough jobs to keep all nodes full until the end.
            await service.groups.submit(groups(0, (4 * at_once + episodes) // SAMPLES))
            done = cursor = 0

            async def finished(wanted: int) -> None:  # reads results like a trainer
                nonlocal done, cursor
                while done < wanted:
                    page = await service.feed.page(cursor, limit=1000, wait_s=60)
                    done, cursor = done + len(page.results), page.next

            await finished(2 * at_once)  # afterwards, short and long episodes are mixed
            before, began, head_s, node_s = done, loop.time(), loop.head_s, loop.node_s
            tokens = sum(server.sampled for server in servers)
            traffic = [(node.handle.calls, node.handle.bytes) for node in nodes]
            await finished(before + episodes // 2)
            status = service.status()
            assert status.router is not None
            row.spread = status.router.load_imbalance
            await finished(before + episodes)
            calls = sum(node.handle.calls for node in nodes) - sum(calls for calls, _ in traffic)
            size = sum(node.handle.bytes for node in nodes) - sum(size for _, size in traffic)
            seconds, head_s, node_s = loop.time() - began, loop.head_s - head_s, loop.node_s - node_s
            tokens = sum(server.sampled for server in servers) - tokens
            done -= before
            assert not status.failures and not status.internal_errors, status
    row.rate, row.tokens, row.load = done / seconds, tokens / seconds, head_s / seconds
    row.head_s, row.node_s = head_s / done, node_s / done
    row.calls, row.bytes = calls / done, size / done
    return row


def simulated(count: int, run: int, episodes: int) -> Row:
    """Measure one row in its own event loop."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        row = runner.run(measure(count, run, episodes))
    gc.collect()
    return row


def actor_call(calls: int = 5_000) -> float:
    """Return the caller's processor seconds for one call of a Ray actor on this machine."""
    import ray

    class Echo:
        async def echo(self, turn: int, session: str) -> tuple[int, str]:
            return turn, session

    async def call_all(actor: Any) -> float:
        await actor.echo.remote(0, "")
        began = time.process_time()
        for number in range(calls):
            await actor.echo.remote(number, "group/1")
        return (time.process_time() - began) / calls

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        return asyncio.run(call_all(ray.remote(Echo).remote()))
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="1,2,4,8", help="numbers of nodes, with commas")
    parser.add_argument("--run", type=int, default=32, help="concurrent episodes in RUN per node")
    parser.add_argument("--episodes", type=int, default=600, help="measured episodes per row")
    chosen = parser.parse_args()
    print(machine())
    print(f"\n{chosen.run} episodes at once on a node, about {TURNS} turns each; one model server per node\n")
    print("| nodes | episodes/s | tokens/s | efficiency | head's core | ms/episode | calls | KB | max/mean |")
    print("|---|---|---|---|---|---|---|---|---|")
    first: Row | None = None
    for count in map(int, chosen.nodes.split(",")):
        row = simulated(count, chosen.run, chosen.episodes)
        first = first or row
        efficiency = (row.tokens / row.nodes) / (first.tokens / first.nodes)
        print(
            f"| {count} | {row.rate:.2f} | {row.tokens:.0f} | {efficiency:.1%} | {row.load:.2%}"
            f" | {row.head_s * 1e3:.2f} | {row.calls:.0f} | {row.bytes / 1e3:.0f} | {row.spread:.2f} |",
            flush=True,
        )
    if importlib.util.find_spec("ray") is not None:
        print(f"\nA call of a Ray actor takes {actor_call() * 1e6:.0f} us of the caller.")


if __name__ == "__main__":
    main()
