"""Effect of a service's worker processes: jobs per second, CPU by process, and latency of submissions.

python -m bench.processes                        # some minutes
python -m bench.processes --processes 0,1,2,4

`prorl-envs serve` as users start it, with different values of `nodes.processes`. Each job runs ten commands
in a real sandbox. The scripted model server has its own process, which uses the same cores.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from bench.__main__ import machine
from bench.results import p99
from prorl_envs.app.run_loop import run
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.token_files import LocalToken

SAMPLES = 8
SCRIPT = Path(sys.executable).with_name("prorl-envs")
TURNS = 10
TASK = {
    "id": "greeting",
    "instruction": "Create greeting.txt with one line: hello, world",
    "checks": [{"type": "file_equals", "path": "greeting.txt", "text": "hello, world\n"}],
    "reference": [
        *[{"tool": "bash", "arguments": {"command": "echo hello, world | tee greeting.txt"}}] * TURNS,
        {"tool": "finish", "arguments": {}},
    ],
}


@asynccontextmanager
async def started(*command: str, until: str, env: dict[str, str]) -> AsyncIterator[tuple[int, str]]:
    """Start one of our programs; return its pid and its first line once that is printed."""
    process = await asyncio.create_subprocess_exec(
        SCRIPT,
        *command,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    said: list[str] = []
    while not said or until not in said[-1]:
        said.append((await process.stdout.readline()).decode())
        if not said[-1]:
            raise RuntimeError(f"{command[0]} did not start: {''.join(said)}")
    reading = asyncio.create_task(process.stdout.read())
    try:
        yield process.pid, said[-1]
    finally:
        process.terminate()
        await process.wait()
        reading.cancel()


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def groups(jobs: int, names: "itertools.count[int]") -> list[GroupRequest]:
    return [
        GroupRequest(id=f"g{next(names)}", environment="bash", task=TASK, samples=SAMPLES)
        for _ in range(jobs // SAMPLES)
    ]


async def read(client: RolloutClient, jobs: int, after: int) -> int:
    """Read the given number of results; each must have a reward."""
    while jobs > 0:
        page = await client.page(after, limit=64, wait_s=60)
        assert all(result.reward == 1.0 for result in page.results), page.results[0].failure
        jobs, after = jobs - len(page.results), page.next
    return after


async def measure(count: int, options: argparse.Namespace, folder: Path) -> None:
    data = folder / "data.jsonl"
    data.write_text(json.dumps(TASK) + "\n")
    run = str(options.run)
    settings = {
        "PRORL_SERVER__PORT": "0",
        "PRORL_SERVICE__RUN": run,
        "PRORL_SERVICE__LIVE": run,
        "PRORL_SERVICE__QUEUE": "1000000",
        "PRORL_NODES__PROCESSES": str(count),
        "PRORL_LOG__LEVEL": "error",
    }
    async with AsyncExitStack() as stack:
        _, line = await stack.enter_async_context(
            started("scripted-model", "bash", "--data", str(data), until="--llm", env={})
        )
        head, line = await stack.enter_async_context(
            started("serve", *line.split(), "--store", "memory", until="rollout service:", env=settings)
        )
        url = line.split()[2]
        client = await stack.enter_async_context(RolloutClient(url))
        plain = await stack.enter_async_context(httpx.AsyncClient(base_url=url, auth=LocalToken()))
        pids = await processes_of(head, plain, count)
        names = itertools.count()
        await client.submit(groups(options.run * SAMPLES, names))
        after = await read(client, options.run * SAMPLES, 0)
        before, began = [cpu_s(pid) for pid in (head, *pids)], time.perf_counter()
        await client.submit(groups(options.jobs, names))
        await read(client, options.jobs, after)
        wall = time.perf_counter() - began
        used = [now - then for now, then in zip([cpu_s(pid) for pid in (head, *pids)], before, strict=True)]
        await client.submit(groups(20 * options.submits, names))
        took, floor = await submits(client, plain, options.submits, names)
    cells = [options.jobs / wall, used[0] / options.jobs * 1e3, sum(used[1:]) / options.jobs * 1e3]
    for times in (took, floor):
        cells += [statistics.median(times) * 1e3, (p99(times) or 0) * 1e3]
    print(f"| {count} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


async def processes_of(head: int, plain: httpx.AsyncClient, count: int) -> list[int]:
    """Return the service's processes, once all have joined."""
    while len((await plain.get("/v1/nodes")).json()["nodes"]) < count:
        await asyncio.sleep(0.2)
    children = Path(f"/proc/{head}/task/{head}/children").read_text().split()
    pids = [int(pid) for pid in children if b"cli.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(pids) == count
    return pids


async def submits(
    client: RolloutClient, plain: httpx.AsyncClient, count: int, names: "itertools.count[int]"
) -> tuple[list[float], list[float]]:
    """Return the seconds to submit groups, and the shortest request before each."""
    took, floor = [], []
    for _ in range(count):
        marks = [time.perf_counter()]
        await plain.get("/health")
        marks.append(time.perf_counter())
        await client.submit(groups(SAMPLES, names))
        marks.append(time.perf_counter())
        floor.append(marks[1] - marks[0])
        took.append(marks[2] - marks[1])
        await asyncio.sleep(0.02)
    return took, floor


async def bench(options: argparse.Namespace) -> None:
    print(
        f"\n{options.run} episodes at once\n\n"
        "| processes | jobs/s | CPU of the service, ms a job | of the processes | submit, median ms | p99 "
        "| `/health`, median ms | p99 |\n|---|---|---|---|---|---|---|---|"
    )
    for _ in range(options.rounds):
        for count in options.processes:
            with tempfile.TemporaryDirectory(prefix="prb-") as folder:
                await measure(count, options, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.processes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", default="0,1,2", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--run", type=int, default=8, help="episodes at once")
    parser.add_argument("--jobs", type=int, default=320)
    parser.add_argument("--submits", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print(machine())
    run(bench(options))


if __name__ == "__main__":
    main()
