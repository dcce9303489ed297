"""Overhead per turn of many concurrent episodes with a slow model.

python -m bench.at_once                       # about six minutes
python -m bench.at_once --numbers 10,100 --peers none

Every episode has ten turns with a `bash` call each, and a model call takes 2 to 4 s. The service stores its
results in a file, as by default. A gap is the time from the planned end of a model call to the start of the
episode's next model call: the overhead of service, sandbox and loop. mini-swe-agent runs the same calls with
a thread per episode, as its own runner does.
"""

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import machine
from bench.episodes import Measurements, SlowCalls
from bench.service import COMMAND, TURNS, InstantModel, ShellEnvironment, bare, read
from prorl_envs.app.tuning import settled
from prorl_envs.cli.run_loop import run
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

_PEER = Path(".build/bench/mini_swe_agent/bin/python")

TABLE = """
| ten turns, 3 s | at once | turns are longer by | after all have begun | gap, median ms | 99th percentile | \
all begun after, s | CPU an episode, ms | memory, MB |
|---|---|---|---|---|---|---|---|---|"""


class SlowModel(InstantModel):
    """Model with slow calls."""

    def __init__(self, renderer: TemplateRenderer, calls: SlowCalls) -> None:
        super().__init__(renderer, {"tool": "bash", "arguments": COMMAND})
        self._calls = calls

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        await asyncio.sleep(self._calls.begin(session) - time.perf_counter())
        return await super().generate(prompt_ids, sampling, session=session)


async def ours(node: Node, folder: Path, count: int) -> Measurements:
    """Run `count` concurrent episodes in a service with a store in a file."""
    renderer = builtin_renderer()
    store = SqliteStore(folder / f"{count}.db")
    settings = ServiceSettings(run=count, max_jobs_with_sandbox=count)
    calls = SlowCalls(count)
    model = SlowModel(renderer, calls)
    service = RolloutService(node, {"shell": ShellEnvironment}, renderer, model, settings, store)
    await service.start()
    try:
        await service.groups.submit(
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
        measured = calls.finish()
    finally:
        await service.stop()
        await store.aclose()
    assert len(measured.gaps) == count * (TURNS - 1)
    return measured


async def peer(kind: str, count: int) -> Measurements:
    """Run `count` concurrent episodes of mini-swe-agent.

    Raises:
        RuntimeError: mini-swe-agent ended with an error.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(_PEER), "-m", "bench.subjects.mini_swe_agent_loop", kind, str(count), str(TURNS)),
        str(find_bwrap()),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problem = await process.communicate()
    if process.returncode:
        raise RuntimeError(problem.decode()[-500:])
    return Measurements(**json.loads(out.splitlines()[-1]))


async def bench(options: argparse.Namespace, folder: Path) -> None:
    print(TABLE, flush=True)
    for count in options.numbers:
        async with Node(make_driver(choose_driver()), folder) as node:
            settled()  # as `prorl-envs serve` does
            await bare(node, 1)  # starts the templates of sandboxes
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
        help="environments of mini-swe-agent (installed by scripts/setup-bench.sh), or none",
    )
    options = parser.parse_args()
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="prb-") as folder:
        run(bench(options, Path(folder)))


if __name__ == "__main__":
    main()
