"""Overhead of the rollout service per job, with an instant model.

python -m bench.service                       # some minutes
python -m bench.service --jobs 100 --queues 100,1000

Every job has ten turns with a `bash` call each in its own sandbox. The floor is a bare loop with the same
sandboxes and calls. The toy environment is measured with the service, but without a sandbox. The subjects
alternate within one run.
"""

import argparse
import asyncio
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.__main__ import machine
from bench.results import p99
from prorl_envs.app.tuning import settled
from prorl_envs.cli.run_loop import run
from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.env.base import Grade, Task
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, FINISH
from prorl_envs.tools.types import ToolCall
from tests.support.toy import ToyWorld, empty_node

TURNS = 10
SAMPLES = 8
#: The output differs each time, so that no cache has an effect.
COMMAND = {"command": "echo done $RANDOM"}
#: Number of concurrent sandboxes and of jobs in RUN, enough to use two cores fully.
AT_ONCE = 8


class ShellTask(Task):
    """Empty task."""


class ShellEnvironment(SandboxedEnvironment[ShellTask]):
    """Environment with a shell and a constant grade."""

    name = "shell"
    task_type = ShellTask
    sandbox_tools = (BASH,)
    finish_spec = FINISH
    system_prompt = "Call bash."

    async def prepare(self, task: ShellTask, session: SandboxSession) -> None:
        """Nothing to prepare."""

    async def grade(self, task: ShellTask, session: SandboxSession) -> Grade:
        return Grade(reward=1.0)


class InstantModel:
    """Model that answers every prompt with the same tool call, without delay."""

    def __init__(self, renderer: TemplateRenderer, call: dict[str, Any]) -> None:
        ids = tuple(renderer.assistant(as_message([call])))
        self._answer = Sampled(ids, (-0.5,) * len(ids), "stop", "1", "in-process")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        return self._answer

    async def aclose(self) -> None:
        """Do nothing, because there is no connection."""


@dataclass(slots=True)
class Measured:
    """Wall time and CPU time of this process per job, in seconds, for each round of a subject."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, jobs: int, wall: float, cpu: float) -> None:
        self.wall.append(wall / jobs)
        self.cpu.append(cpu / jobs)


@asynccontextmanager
async def timed(measured: Measured, jobs: int) -> AsyncIterator[None]:
    """Measure the block as the time of `jobs` jobs."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    measured.add(jobs, time.perf_counter() - wall, time.process_time() - cpu)


async def bare(node: Node, jobs: int) -> None:
    """Run the sandboxes and calls of `jobs` jobs without a service."""
    numbers = iter(range(jobs))

    async def run_jobs() -> None:
        for _ in numbers:
            async with ShellEnvironment(node) as environment:
                await environment.init(ShellTask(id="t", instruction="Work."))
                for turn in range(TURNS):
                    call = ToolCall(id=str(turn), name="bash", arguments=dict(COMMAND))
                    assert (await environment.call(call, timeout_s=60)).ok
                await environment.eval()

    await asyncio.gather(*(run_jobs() for _ in range(AT_ONCE)))


def groups(environment: str, jobs: int, names: Iterator[int], turns: int = TURNS) -> list[GroupRequest]:
    """Create groups with `jobs` jobs in total."""
    return [
        GroupRequest(
            id=f"g{next(names)}",
            environment=environment,
            task={"id": "t", "instruction": "Do what has to be done. " * 20},
            samples=SAMPLES,
            limits=AgentLimits(max_turns=turns),
        )
        for _ in range(jobs // SAMPLES)
    ]


class Subject:
    """Environment to measure; each round has its own service.

    Args:
        node: node of the environments.
        family: family of the environments.
        renderer: tokenizer and template of the model.
        call: tool call of each turn.
        turns: number of turns per job.
    """

    def __init__(
        self,
        node: Node,
        family: Family,
        renderer: TemplateRenderer,
        call: dict[str, Any],
        turns: int = TURNS,
    ) -> None:
        self._turns = turns
        self._node = node
        self._family = family
        self._renderer = renderer
        self._model = InstantModel(renderer, call)
        self._names = itertools.count()

    def service(self, store: SqliteStore | None = None) -> RolloutService:
        settings = ServiceSettings(
            init=2, run=AT_ONCE, eval=2, max_jobs_with_sandbox=AT_ONCE, queue=1_000_000
        )
        return RolloutService(
            self._node, {"shell": self._family}, self._renderer, self._model, settings, store
        )

    def groups(self, jobs: int) -> list[GroupRequest]:
        return groups("shell", jobs, self._names, self._turns)

    async def round(self, measured: Measured, jobs: int, queue: int, folder: Path | None = None) -> None:
        """Measure the time to finish `jobs` jobs while `queue` more jobs are queued.

        Args:
            folder: folder for the store; None stores results in memory.
        """
        store = SqliteStore(folder / f"{next(self._names)}.db") if folder else None
        service = self.service(store)
        await service.start()
        try:
            await service.groups.submit(self.groups(queue))
            after = 0  # jobs that finish during the submission are not counted
            while found := (await service.feed.page(after, limit=1000)).results:
                after = found[-1].cursor
            async with timed(measured, jobs):
                await service.groups.submit(self.groups(jobs))
                await read(service, jobs, after)
        finally:
            await service.stop()
            if store is not None:
                await store.aclose()


async def read(service: RolloutService, jobs: int, after: int) -> None:
    """Read `jobs` results after a cursor like a trainer. Each must have reward 1."""
    while jobs > 0:
        page = await service.feed.page(after, limit=64, wait_s=60)
        assert all(result.reward == 1.0 for result in page.results), page.results[0].failure
        jobs -= len(page.results)
        after = page.next


async def submitter(url: str, count: int, pause_s: float) -> tuple[list[float], list[float]]:
    """Submit groups one by one. Return the seconds of each, and of a `/health` request before each."""
    names, took, floor = itertools.count(), [], []
    async with RolloutClient(url) as client, httpx.AsyncClient(base_url=url) as plain:
        await client.status()
        for _ in range(count):
            group = groups("shell", SAMPLES, names)[0].model_copy(update={"id": f"s{next(names)}"})
            marks = [time.perf_counter()]
            await plain.get("/health")
            marks.append(time.perf_counter())
            await client.submit([group])
            marks.append(time.perf_counter())
            floor.append(marks[1] - marks[0])
            took.append(marks[2] - marks[1])
            await asyncio.sleep(pause_s)
    return took, floor


async def submits(
    subject: Subject, count: int, queue: int, folder: Path | None
) -> tuple[list[float], list[float]]:
    """Return the seconds of submissions over HTTP, and of `/health` requests, while `queue` jobs wait."""
    store = SqliteStore(folder / "submits.db") if folder else None
    service = subject.service(store)
    try:
        async with serving(service, ServerSettings(port=0)) as url:
            await service.groups.submit(subject.groups(queue))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.service", "--submitter", url, "--submits", str(count)),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            took, floor = json.loads(output)
            return took, floor
    finally:
        if store is not None:
            await store.aclose()


async def bench(options: argparse.Namespace, folder: Path) -> None:
    renderer, world = builtin_renderer(), ToyWorld()
    world.logging = False
    toy = Subject(empty_node(), world.family(), renderer, {"tool": "say", "arguments": {"text": "done 2"}})
    async with Node(make_driver(choose_driver()), folder, warm_pool_size=AT_ONCE) as node:
        shell = Subject(node, ShellEnvironment, renderer, {"tool": "bash", "arguments": COMMAND})
        settled()  # as `prorl-envs serve` does
        await bare(node, 2 * AT_ONCE)  # starts the templates, and the pool estimates the demand
        floor = Measured()
        rows = {
            (f"service, {name}{kind}", queue): (subject, Measured(), where)
            for name, subject in (("sandbox", shell), ("toy", toy))
            for kind, where in (("", None), (", file", folder))
            for queue in options.queues
        }
        for _ in range(options.rounds):
            async with timed(floor, options.jobs):
                await bare(node, options.jobs)
            for (_, queue), (subject, measured, where) in rows.items():
                jobs = options.jobs if subject is shell else 4 * options.jobs
                await subject.round(measured, jobs, queue, where)
        print(TABLE)
        line("bare loop, sandbox", None, floor, floor)
        for (name, queue), (subject, measured, _) in rows.items():
            line(name, queue, measured, floor if subject is shell else None)
        print(SUBMITS)
        for name, where in (("memory", None), ("file", folder)):
            for queue in options.queues:
                both = await submits(shell, options.submits, queue, where)
                cells = [
                    cell for took in both for cell in (statistics.median(took) * 1e3, (p99(took) or 0) * 1e3)
                ]
                print(f"| {name} | {queue:,} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


TABLE = """
| ten turns | queued | jobs/s | ms of this process's CPU | times the bare loop's wall | more CPU than it, ms |
|---|---|---|---|---|---|"""

SUBMITS = """
| submit over HTTP, a group of 8 | queued | median ms | p99 ms (asked: 20) | `/health` median ms | p99 ms |
|---|---|---|---|---|---|"""


def line(name: str, queue: int | None, measured: Measured, floor: Measured | None) -> None:
    """Print one row; a ratio is the median of the rounds' ratios."""
    wall, cpu = statistics.median(measured.wall), statistics.median(measured.cpu)
    cells = ["", ""]
    if floor is not None and floor is not measured:
        times = [ours / bare for ours, bare in zip(measured.wall, floor.wall, strict=True)]
        more = [ours - bare for ours, bare in zip(measured.cpu, floor.cpu, strict=True)]
        cells = [f"{statistics.median(times):.2f}", f"{statistics.median(more) * 1e3:.1f}"]
    waiting = "" if queue is None else f"{queue:,}"
    print(f"| {name} | {waiting} | {1 / wall:.0f} | {cpu * 1e3:.1f} | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.service", description=__doc__)
    parser.add_argument(
        "--jobs",
        type=int,
        default=160,
        help="jobs per round with sandboxes; rounds without have four times as many",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--queues", default="100,1000,10000", type=lambda text: [int(n) for n in text.split(",")]
    )
    parser.add_argument("--submits", type=int, default=200)
    parser.add_argument("--submitter", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.submitter:
        print(json.dumps(asyncio.run(submitter(options.submitter, options.submits, 0.02))))
        return
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="prb-") as folder:
        run(bench(options, Path(folder)))


if __name__ == "__main__":
    main()
