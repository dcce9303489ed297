"""Time to list, open and search ten thousand stored episodes, compared with reading and decoding the bytes.

python -m bench.listing                        # a file and a store of 10,000 episodes, about 260 MB each
python -m bench.listing --tokens 20000 --count 1000
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.__main__ import machine
from prorl_envs.cli.run_loop import run
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result, StopReason, Trajectory, TurnRecord
from prorl_envs.rollout.http.server import answering
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.read_only import StoredEpisodes
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.viewer.episodes import EpisodeSource
from prorl_envs.viewer.index import Index
from prorl_envs.viewer.offline import offline_app

SAMPLES, TURNS = 8, 10
#: Bytes of text in a turn.
SAID = 700
NEEDLE = "the needle in the last one"


def results(count: int, tokens: int) -> Iterator[Result]:
    """Create results of ten turns each. Half of the tokens are sampled."""
    span = tokens // (2 * TURNS)
    mask = ([0] * span + [1] * span) * TURNS
    logprobs = [-0.1234567 * (1 + i % 7) * kind for i, kind in enumerate(mask)]
    ids = [(i * 7919) % 150_000 for i in range(len(mask))]
    turns = [
        TurnRecord(
            start=(2 * i + 1) * span,
            end=(2 * i + 2) * span,
            finish_reason="stop",
            weight_version="7",
            server="http://model:8000",
            model_s=1.5,
            tools_s=0.1,
        )
        for i in range(TURNS)
    ]
    trajectory = Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs, turns=turns)
    text = 'A line of output, with "quotes" and more.\n' * (SAID // 42)
    messages = [{"role": ("assistant", "tool")[i % 2], "content": text} for i in range(2 * TURNS)]
    for number in range(count):
        group, sample = f"step{number // 1000}/task-{number // SAMPLES}", number % SAMPLES
        last = [{"role": "user", "content": NEEDLE}] if number == count - 1 else []
        yield Result(
            job_id=f"{group}/{sample}",
            group_id=group,
            sample=sample,
            environment="bash",
            task_id=f"task-{number // SAMPLES}",
            state=JobState.DONE,
            reward=float(number % 3 == 0),
            mask_sample=False,
            stop_reason=StopReason.FINISHED,
            failure=None,
            messages=messages + last,
            trajectory=trajectory,
        )


async def keep(path: Path, stored: list[Result]) -> None:
    """Create a store with the results."""
    store = SqliteStore(path, max_tokens=1 << 40)
    names = dict.fromkeys(result.group_id for result in stored)
    await store.submit(
        [
            NewGroup(GroupRequest(id=n, environment="bash", task={"id": "t"}, samples=SAMPLES), "t")
            for n in names
        ]
    )
    for first in range(0, len(stored), 64):
        await asyncio.gather(*(store.record(result) for result in stored[first : first + 64]))
    await store.aclose()


def floors(path: Path) -> dict[str, float]:
    """Return the seconds to read the bytes of a file, and to decode its JSON with the standard library."""
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass
    read = time.perf_counter() - began
    began = time.perf_counter()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return {"read the bytes": read, "decode the JSON": time.perf_counter() - began}


async def measured(found: Callable[[], EpisodeSource], count: int) -> dict[str, float]:
    """Return the seconds from the start of the server until a client has the page's data over HTTP."""
    began = time.perf_counter()
    episodes, took = found(), {}

    def note(step: str) -> None:
        took[step] = time.perf_counter() - began

    async with (
        answering(offline_app(episodes, "secret"), last_requests_s=1, log_level="critical") as url,
        httpx.AsyncClient(base_url=f"{url}/secret/api/", timeout=60) as http,
    ):
        known, more = 0, True
        while more:
            page = (await http.get(f"episodes?after={known}")).json()
            known, more = known + len(page["entries"]), page["more"]
            if "first rows" not in took:
                note("first rows")
        note("all rows")
        assert known == count, known
        began = time.perf_counter()
        await http.get(f"episodes/{count // 2}")
        note("open one")
        began, after = time.perf_counter(), 0
        hits: list[int] = []
        while after < count:
            step = (await http.get("search", params={"text": NEEDLE, "after": after})).json()
            hits, after = hits + step["numbers"], step["next"]
        note("search all")
        assert hits == [count - 1], hits
    episodes.close()
    return took


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Open a browser; yield None if there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        program = None
    if program is None:
        yield None
        return
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=program, args=["--disable-gpu", "--no-sandbox"]
        )
        yield browser
        await browser.close()


async def seen(browser: Any, found: Callable[[], EpisodeSource], count: int) -> dict[str, float]:
    """Return the seconds until a browser shows the list and, after a click, an episode."""
    took = {}
    page = await browser.new_page()
    episodes = found()
    async with answering(offline_app(episodes, "secret"), last_requests_s=1, log_level="critical") as url:
        began = time.perf_counter()
        await page.goto(f"{url}/secret/")
        await page.locator(".list .row").first.wait_for()
        took["rows in Chromium"] = time.perf_counter() - began
        await page.get_by_text(f"{count:,} episodes").wait_for()
        took["all in Chromium"] = time.perf_counter() - began
        began = time.perf_counter()
        await page.get_by_role("link", name="/3").first.click()
        await page.get_by_role("region", name="Turn 1", exact=True).wait_for()
        took["one in Chromium"] = time.perf_counter() - began
        await page.close()
    episodes.close()
    return took


async def rounds(times: int, work: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Repeat a measurement, and return the medians."""
    found = [await work() for _ in range(times)]
    return {name: statistics.median(values[name] for values in found) for name in found[0]}


async def bench(folder: Path, count: int, tokens: int, times: int) -> None:
    path, store = folder / "results.jsonl", folder / "store.db"
    stored = list(results(count, tokens))
    with path.open("w") as file:
        file.writelines(result.model_dump_json() + "\n" for result in stored)
    await keep(store, stored)
    del stored
    sources: dict[str, Callable[[], EpisodeSource]] = {
        "file": lambda: Index(path),
        "store": lambda: StoredEpisodes(store),
    }
    print(f"{machine()}\n\n{count:,} results: file {path.stat().st_size / 1e6:.0f} MB, ", end="")
    print(f"store {store.stat().st_size / 1e6:.0f} MB\n\n| | s | times reading the bytes |\n|---|---|---|")
    found = [floors(path) for _ in range(times)]
    base = {name: statistics.median(values[name] for values in found) for name in found[0]}
    floor = base["read the bytes"]

    def tell(rows: dict[str, float], where: str = "") -> None:
        for name, seconds in rows.items():
            print(f"| {where}{name} | {seconds:.3f} | {seconds / floor:.1f} |", flush=True)

    tell(base)
    async with chromium() as browser:
        for name, opened in sources.items():
            tell(await rounds(times, lambda opened=opened: measured(opened, count)), f"{name}: ")  # type: ignore[misc]
            if browser is not None:
                tell(await rounds(times, lambda opened=opened: seen(browser, opened, count)), f"{name}: ")  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the files"
    )
    parser.add_argument("--count", type=int, default=10_000, help="episodes")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per episode")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; their medians are printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run(bench(Path(folder), options.count, options.tokens, options.rounds))


if __name__ == "__main__":
    main()
