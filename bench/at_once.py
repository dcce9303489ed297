"""Many episodes at once with a model that takes its time: how much longer does a turn take than the model?

python -m bench.at_once                       # some six minutes
python -m bench.at_once --numbers 10,100 --peers none

Every episode has ten turns with a `bash` call each, and a model call takes 2 to 4 s. The service keeps its
results in a file, as by default. A gap is the time from the planned end of a model call to the start of the
episode's next one: what service, sandbox and loop add to a turn. mini-swe-agent runs the same calls
with a thread per episode, as its own runner does.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.__main__ import machine
from bench.memory import Memory
from bench.service import COMMAND, TURNS, InstantModel, ShellEnvironment, bare, read
from prorl_envs.app.run_loop import run, settled
from prorl_envs.config import ServiceSettings
from prorl_envs.env.node import Node
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.drivers.probe import find_bwrap
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.testing.tokenizer import builtin_renderer

#: Least and most seconds of a model call.
CALL_S = (2.0, 4.0)
_PEER = Path(".build/bench/mini_swe_agent/bin/python")


@dataclass(slots=True)
class Episodes:
    """Measurements of episodes that ran at once.

    Args:
        gaps: seconds between two model calls of an episode.
        model_s: seconds of all model calls.
        begun_s: seconds until every episode had made its first model call.
        cpu_s: processor time of the process that runs them; its sandboxes are not in it.
        memory: bytes that were no longer available on the machine when all had begun.
    """

    gaps: list[float] = field(default_factory=list)
    model_s: float = 0.0
    begun_s: float = 0.0
    cpu_s: float = 0.0
    memory: int = 0

    def row(self, name: str, count: int) -> str:
        """Return a row of the table."""
        cuts = statistics.quantiles(self.gaps, n=100)
        cells = [
            f"{sum(self.gaps) / self.model_s:.2%}",
            f"{cuts[49] * 1e3:.1f}",
            f"{cuts[98] * 1e3:.1f}",
            f"{self.begun_s:.1f}",
            f"{self.cpu_s / count * 1e3:.0f}",
            f"{self.memory / 1e6:.0f}",
        ]
        return f"| {name} | {count:,} | {' | '.join(cells)} |"


TABLE = """
| ten turns of 3 s | at once | turns are longer by | gap, median ms | 99th percentile | all begun after, s | \
CPU an episode, ms | memory, MB |
|---|---|---|---|---|---|---|---|"""


class SlowModel(InstantModel):
    """Model whose calls take their time, and which measures the gaps between them.

    Args:
        episodes: measurements to fill.
        count: number of episodes.
    """

    def __init__(self, renderer: TemplateRenderer, episodes: Episodes, count: int) -> None:
        super().__init__(renderer, {"tool": "bash", "arguments": COMMAND})
        self._episodes = episodes
        self._count = count
        self._ends: dict[str, float] = {}
        self._random = random.Random(0)
        self._began = time.perf_counter()
        self._available = Memory.now().available

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        now, takes = time.perf_counter(), self._random.uniform(*CALL_S)
        if session in self._ends:
            self._episodes.gaps.append(now - self._ends[session])
        self._ends[session] = now + takes
        self._episodes.model_s += takes
        if len(self._ends) == self._count and not self._episodes.begun_s:
            self._episodes.begun_s = now - self._began
            self._episodes.memory = self._available - Memory.now().available
        await asyncio.sleep(now + takes - time.perf_counter())
        return await super().generate(prompt_ids, sampling, session=session)


async def ours(node: Node, folder: Path, count: int) -> Episodes:
    """Run that many episodes at once in a service with a file."""
    episodes, renderer = Episodes(), builtin_renderer()
    store = SqliteStore(folder / f"{count}.db")
    settings = ServiceSettings(run=count, max_jobs_with_sandbox=count)
    model = SlowModel(renderer, episodes, count)
    service = RolloutService(node, {"shell": ShellEnvironment}, renderer, model, settings, store)
    await service.start()
    cpu = time.process_time()
    try:
        await service.submit(
            [
                GroupRequest(
                    id=f"g{index}",
                    environment="shell",
                    task={"id": "t", "instruction": "Do what has to be done."},
                    samples=1,
                    limits=AgentLimits(max_turns=TURNS),
                )
                for index in range(count)
            ]
        )
        await read(service, count, 0)
        episodes.cpu_s = time.process_time() - cpu
    finally:
        await service.stop()
        await store.aclose()
    assert len(episodes.gaps) == count * (TURNS - 1)
    return episodes


async def peer(kind: str, count: int) -> Episodes:
    """Run that many episodes of mini-swe-agent at once.

    Raises:
        RuntimeError: it ended with an error.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(_PEER), "-m", "bench.subjects.mini_swe_agent_loop", kind, str(count), str(TURNS)),
        *(*map(str, CALL_S), str(find_bwrap())),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problem = await process.communicate()
    if process.returncode:
        raise RuntimeError(problem.decode()[-500:])
    return Episodes(**json.loads(out.splitlines()[-1]))


async def bench(options: argparse.Namespace, folder: Path) -> None:
    print(TABLE, flush=True)
    for count in options.numbers:
        async with Node(make_driver(choose_driver()), folder) as node:
            settled()  # as `prorl-envs serve` does
            await bare(node, 1)  # the templates of sandboxes
            print((await ours(node, folder, count)).row("**prorl-envs**", count), flush=True)
        for kind in options.peers:
            name = f"mini-swe-agent, {kind}"
            try:
                row = (await peer(kind, count)).row(name, count)
            except (OSError, RuntimeError) as error:
                row = f"| {name} | {count:,} | failed: {' '.join(str(error).split())[-200:]} |"
            print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.at_once", description=__doc__)
    parser.add_argument(
        "--numbers", default="10,100,300,1000", type=lambda text: [int(number) for number in text.split(",")]
    )
    parser.add_argument(
        "--peers",
        default="local,bubblewrap",
        type=lambda text: [] if text == "none" else text.split(","),
        help="environments of mini-swe-agent, which scripts/setup-bench.sh installs; or none",
    )
    options = parser.parse_args()
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="prb-") as folder:
        run(bench(options, Path(folder)))


if __name__ == "__main__":
    main()
