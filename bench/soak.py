"""Resources of a service during many jobs: memory, descriptors, processes, size of the store's file.

python -m bench.soak                                 # 10,000 jobs with a sandbox each
python -m bench.soak --jobs 100000 --toy             # without sandboxes
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.__main__ import machine
from bench.service import COMMAND, SAMPLES, ShellEnvironment, Subject
from prorl_envs.app.run_loop import run
from prorl_envs.env.node import Node
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.leaks import OpenResources
from tests.support.toy import ToyWorld, empty_node

#: Largest accepted growth from the first quarter to the end.
MAY_GROW = {"memory": 10_000_000, "descriptors": 8, "processes": 8}


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of this process and its sandboxes; memory and file in bytes, others as numbers."""

    jobs: int
    seconds: float
    memory: int
    descriptors: int
    processes: int
    objects: int
    file: int


def look(jobs: int, seconds: float, run_dir: Path, store: Path) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = [path for path in store.parent.glob(store.name + "*") if path.is_file()]
    return Held(
        jobs,
        seconds,
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(list(Path("/proc/self/fd").iterdir())),
        len(OpenResources.now(run_dir).processes),
        len(gc.get_objects()),
        sum(path.stat().st_size for path in files),
    )


async def soak(options: argparse.Namespace, folder: Path) -> list[Held]:
    """Submit the jobs over HTTP, and read every result once, like a trainer."""
    renderer, world = builtin_renderer(), ToyWorld()
    world.logging = False
    run_dir, path = folder / "run", folder / "store.db"
    run_dir.mkdir()
    node = (
        empty_node() if options.toy else Node(make_driver(choose_driver(), run_dir), folder, warm_pool_size=4)
    )
    say = {"tool": "say", "arguments": {"text": "done 2"}}
    call = say if options.toy else {"tool": "bash", "arguments": COMMAND}
    family = world.family() if options.toy else ShellEnvironment
    store = SqliteStore(path, max_results=options.keep)
    curve: list[Held] = []
    try:
        async with node:
            subject = Subject(node, family, renderer, call, turns=options.turns)
            async with serving(subject.service(store)) as url, RolloutClient(url) as client:
                curve = await feed(
                    client, subject, options, lambda jobs, seconds: look(jobs, seconds, run_dir, path)
                )
    finally:
        await store.aclose()
    return curve


async def feed(
    client: RolloutClient,
    subject: Subject,
    options: argparse.Namespace,
    look_at: Callable[[int, float], Held],
) -> list[Held]:
    """Submit jobs so that some are always queued, and measure the resources `options.points` times."""
    curve: list[Held] = []
    started, done, submitted, after = time.monotonic(), 0, 0, 0
    print("| jobs | s | MB | descriptors | processes | objects | file MB |\n|---|---|---|---|---|---|---|")
    while done < options.jobs:
        while submitted < options.jobs and submitted - done < 4 * SAMPLES:
            await client.submit(subject.groups(SAMPLES))
            submitted += SAMPLES
        page = await client.page(after, limit=100, wait_s=30)
        assert all(result.reward == 1.0 for result in page.results), page.results[0].failure
        before, done, after = done, done + len(page.results), page.next
        if done * options.points // options.jobs > before * options.points // options.jobs:
            curve.append(look_at(done, time.monotonic() - started))
            line(curve[-1])
    return curve


def line(held: Held) -> None:
    print(
        f"| {held.jobs:,} | {held.seconds:.0f} | {held.memory / 1e6:.1f} | {held.descriptors} "
        f"| {held.processes} | {held.objects:,} | {held.file / 1e6:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--points", type=int, default=20, help="number of measurements")
    parser.add_argument("--keep", type=int, default=500, help="largest number of results in the store")
    parser.add_argument("--toy", action="store_true", help="without sandboxes")
    options = parser.parse_args()
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL)
    print(machine(), "\n")
    with tempfile.TemporaryDirectory(prefix="prb-") as folder:
        curve = run(soak(options, Path(folder)))
    sys.exit(not flat(curve))


def flat(curve: list[Held]) -> bool:
    """Print the growth from the second to the last quarter; return whether it is within the limits."""
    quarter = max(len(curve) // 4, 1)
    early, late = curve[quarter : 2 * quarter] or curve[:1], curve[-quarter:]
    good = True
    print()
    for name, bound in MAY_GROW.items():
        grown = statistics.median(getattr(held, name) for held in late) - statistics.median(
            getattr(held, name) for held in early
        )
        good &= grown <= bound
        print(f"{name}: {grown:+,.0f} (at most {bound:,})")
    return good


if __name__ == "__main__":
    main()
