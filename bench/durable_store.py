"""Cost of a store in a file, compared with a store in memory and with bare flushes.

python -m bench.durable_store --folder FOLDER     # a folder on the disk to measure
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from prorl_envs.cli.run_loop import run
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.rollout.api.types import (
    GroupRequest,
    JobState,
    Result,
    StopReason,
    Trajectory,
    TurnRecord,
    job_id,
)
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import MemoryStore, SqliteStore

SAMPLES = 8
TURNS = 10
VOCABULARY = 150_000


def groups(count: int, prefix: str) -> list[NewGroup]:
    """Create `count` groups of a task with an instruction of 2 kB."""
    task = {"id": "t", "instruction": "Do what has to be done. " * 80}
    return [
        NewGroup(GroupRequest(id=f"{prefix}{i}", environment="bash", task=task, samples=SAMPLES), "t")
        for i in range(count)
    ]


def results(group: NewGroup, tokens: int, chance: random.Random) -> Iterator[Result]:
    """Create a result per sample. Half of the tokens are sampled; log-probabilities have single precision."""
    span = tokens // (2 * TURNS)
    mask = ([0] * span + [1] * span) * TURNS
    for sample in range(SAMPLES):
        turn: dict[str, Any] = {"finish_reason": "stop", "weight_version": "7", "server": "http://model:8000"}
        turns = [
            TurnRecord(start=(2 * i + 1) * span, end=(2 * i + 2) * span, model_s=1.5, tools_s=0.1, **turn)
            for i in range(TURNS)
        ]
        logprobs = array("f", (-chance.expovariate(3) * kind for kind in mask)).tolist()
        ids = [min(int(chance.paretovariate(0.3)), VOCABULARY) for _ in mask]
        yield Result(
            job_id=job_id(group.request.id, sample),
            group_id=group.request.id,
            sample=sample,
            environment="bash",
            task_id="t",
            state=JobState.DONE,
            reward=1.0,
            mask_sample=False,
            stop_reason=StopReason.FINISHED,
            failure=None,
            trajectory=Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs, turns=turns),
        )


async def rate[T](work: Callable[[T], Awaitable[object]], items: list[T], at_once: int) -> float:
    """Return the items per second of `at_once` concurrent callers."""
    queue = iter(items)

    async def caller() -> None:
        for item in queue:
            await work(item)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return len(items) / (time.perf_counter() - started)


async def measure(name: str, store: SqlStore, tokens: int, count: int) -> None:
    """Print the rates of a store for submissions and results, with one caller and with 64."""
    chance = random.Random(5)
    cells = []
    for at_once in (1, 64):
        new = groups(count, f"{name}-{at_once}-")
        cells.append(await rate(lambda group: store.submit([group]), new, at_once))
        done = [result for group in new[: count // SAMPLES] for result in results(group, tokens, chance)]
        cells.append(await rate(store.record, done, at_once))
    print(f"{name:16}" + "".join(f"{cell:12,.0f}" for cell in cells))


async def journal(store: SqlStore, answers: int = 2000, tokens: int = 400) -> float:
    """Return the milliseconds of CPU time, in all threads, that the journal of turns costs per turn."""
    chance = random.Random(5)
    [group] = groups(1, "journal-")
    await store.submit([group])
    ids = tuple(min(int(chance.paretovariate(0.3)), VOCABULARY) for _ in range(tokens))
    logprobs = tuple(array("f", (-chance.expovariate(3) for _ in ids)))
    answer, ledger = Sampled(ids, logprobs, "stop", "7", "http://model:8000"), Ledger([1])
    started = time.process_time()
    for _ in range(answers):
        store.note_turn(job_id(group.request.id, 0), ledger.history(), answer)
        ledger.sampled(answer, 0.0)
        await asyncio.sleep(0)
    await store.submit(groups(1, "last-"))  # written after all turns
    return 1000 * (time.process_time() - started) / answers


def flushes(folder: Path, count: int = 200) -> float:
    """Return the rate of page appends with a flush each, per second: the floor for one caller."""
    with (folder / "floor").open("wb") as file:
        started = time.perf_counter()
        for _ in range(count):
            file.write(bytes(4096))
            file.flush()
            os.fdatasync(file.fileno())
        return count / (time.perf_counter() - started)


async def restart(path: Path, jobs: int) -> None:
    """Print the time that a restarted service needs to read `jobs` unfinished jobs from its store."""
    store = SqliteStore(path)
    await store.submit(groups(jobs // SAMPLES, "unfinished-"))
    await store.aclose()
    started = time.perf_counter()
    store = SqliteStore(path)
    unfinished = await store.unfinished()
    took = time.perf_counter() - started
    unfinished_jobs = sum(not job.state.final for group in unfinished for job in group.jobs)
    print(f"open and read {unfinished_jobs:,} jobs: {took:.3f} s")
    await store.aclose()


async def bench(folder: Path, tokens: int, count: int) -> None:
    print(f"{flushes(folder):,.0f} flushes/s; results of {tokens:,} tokens\n")
    print(f"{'a second':16}{'submit, 1':>12}{'record, 1':>12}{'submit, 64':>12}{'record, 64':>12}")
    path = folder / "store.db"
    store = SqliteStore(path)
    await measure("memory", MemoryStore(), tokens, count)
    await measure("sqlite", store, tokens, count)
    turn_ms = await journal(store)
    await store.aclose()
    recorded = 2 * (count // SAMPLES) * SAMPLES
    print(f"\n{path.stat().st_size / (recorded * tokens):.2f} bytes of file per token")
    print(f"journal of a turn of 400 tokens: {turn_ms:.2f} ms of CPU time")
    await restart(folder / "restart.db", 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the files"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of a result")
    parser.add_argument("--count", type=int, default=1000, help="groups submitted, and results recorded")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(bench(Path(folder), options.tokens, options.count))


if __name__ == "__main__":
    main()
