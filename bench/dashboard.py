"""Frame times of a busy service's pages in a browser, and their cost to the service.

python -m bench.dashboard                     # 5,000 jobs in flight, 200 results per second
python -m bench.dashboard --jobs 1000 --seconds 5

The service is real, its environments have no sandbox, and its model answers after a delay. Service and
browser share this machine, so its load delays frames. The time of the page's thread is processor time, which
does not depend on the load.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.__main__ import machine
from bench.listing import chromium
from bench.results import p99
from prorl_envs.cli.run_loop import run
from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import ToyWorld, empty_node

SAMPLES, GROUPS = 8, 25
#: Share of the jobs in RUN.
RUN_SHARE = 0.1
#: Number of results before the measurement starts.
FIRST = 1000
#: Number of requests per median.
LOOKS = 20

#: Script that records the seconds of each frame, and of each task of over 50 ms in the page's thread.
_RECORD = """() => {
  window.frames_s = []; window.long_s = [];
  new PerformanceObserver((list) => {
    for (const { duration } of list.getEntries()) window.long_s.push(duration / 1000);
  }).observe({ type: "longtask" });
  let last = performance.now();
  const step = (now) => {
    window.frames_s.push((now - last) / 1000);
    last = now;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}"""


class SlowModel:
    """Model that finishes every task after `mean_s` seconds on average."""

    def __init__(self, mean_s: float) -> None:
        self._mean_s = mean_s
        self.renderer = builtin_renderer()
        self._random = random.Random(0)
        finish = {"tool": "finish", "arguments": {}}
        ids = tuple(self.renderer.assistant(as_message([finish])))
        self._answer = Sampled(ids, (-0.5,) * len(ids), "stop", "1", "in-process")

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        await asyncio.sleep(self._mean_s * (0.5 + self._random.random()))
        return self._answer

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""


@contextlib.asynccontextmanager
async def busy(jobs: int, rate: float) -> AsyncIterator[tuple[RolloutService, str]]:
    """Run a service with `jobs` jobs in flight and `rate` results per second; yield it with its URL."""
    running = max(1, int(jobs * RUN_SHARE))
    model, world = SlowModel(running / rate), ToyWorld()
    world.logging = False
    settings = ServiceSettings(
        init=64, run=running, eval=64, max_jobs_with_sandbox=2 * running, queue=jobs + GROUPS * SAMPLES
    )
    service = RolloutService(empty_node(), {"toy": world.family()}, model.renderer, model, settings)
    names = itertools.count()

    def group(number: int) -> GroupRequest:
        task = {"id": f"task-{number}", "instruction": "Do it.", "reward": number % 3 / 2}
        if number % 40 == 0:
            task["faults"] = {"eval": "grader"}
        return GroupRequest(
            id=f"step{number // 1000}/task-{number}", environment="toy", task=task, samples=SAMPLES
        )

    async def refill() -> None:
        while True:
            while service.status().unfinished < jobs:
                await service.groups.submit([group(next(names)) for _ in range(GROUPS)])
            await asyncio.sleep(0.05)

    async with serving(service, ServerSettings(port=0, generate_token=False)) as url:
        task = asyncio.create_task(refill())
        try:
            yield service, url
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def watched(browser: Any, service: RolloutService, url: str, seconds: float) -> dict[str, float]:
    """Measure a page for some seconds; all returned figures are for this period."""
    page = await browser.new_page()
    cdp = await page.context.new_cdp_session(page)
    received: Counter[str] = Counter()
    paths: dict[str, str] = {}
    cdp.on("Network.requestWillBeSent", lambda e: paths.update({e["requestId"]: e["request"]["url"]}))
    cdp.on(
        "Network.dataReceived",
        lambda e: received.update(
            {paths[e["requestId"]].partition("?")[0].rpartition("/")[2]: e["dataLength"]}
        ),
    )
    await cdp.send("Network.enable")
    await cdp.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def busy_s() -> float:
        found = (await cdp.send("Performance.getMetrics"))["metrics"]
        return next(float(metric["value"]) for metric in found if metric["name"] == "TaskDuration")

    await page.goto(url)
    await page.get_by_text("live", exact=True).wait_for()
    await page.locator(".list .row").first.wait_for()
    await asyncio.sleep(3)
    await page.evaluate(_RECORD)
    received.clear()
    began, before, ended = time.perf_counter(), await busy_s(), service.feed.newest
    await asyncio.sleep(seconds)
    took, spent = time.perf_counter() - began, await busy_s() - before
    frames, long = await page.evaluate("[window.frames_s, window.long_s]")
    nodes = await page.evaluate("document.getElementsByTagName('*').length")
    await page.close()
    return {
        "results a second": (service.feed.newest - ended) / took,
        "processor share of the page's thread, %": 100 * spent / took,
        "median frame, ms": 1000 * statistics.median(frames),
        "99th percentile frame, ms": 1000 * (p99(frames) or max(frames)),
        "tasks over 50 ms, a minute": 60 * len(long) / took,
        "longest task, ms": 1000 * max(long, default=0.0),
        "elements in the page": nodes,
        "kB/s of snapshots": received["dashboard"] / took / 1000,
        "kB/s of summaries": received["summaries"] / took / 1000,
        "kB/s of the list of jobs": received["jobs"] / took / 1000,
    }


async def looks(service: RolloutService) -> dict[str, float]:
    """Return the service's processor time for one request of a page, in milliseconds."""
    took: dict[str, list[float]] = {"a snapshot": [], "a page of jobs": []}
    for _ in range(LOOKS):
        began = time.process_time()
        size = len(service.dashboard.view(fresh_s=0).model_dump_json())
        took["a snapshot"].append(time.process_time() - began)
        began = time.process_time()
        service.live_jobs.page(limit=1000).model_dump_json()
        took["a page of jobs"].append(time.process_time() - began)
        await asyncio.sleep(0)
    return {
        **{f"{name}, ms": 1000 * statistics.median(found) for name, found in took.items()},
        "kB of a snapshot": size / 1000,
    }


async def bench(jobs: int, rate: float, seconds: float) -> None:
    def tell(where: str, rows: dict[str, float]) -> None:
        for name, value in rows.items():
            print(f"| {where}: {name} | {value:,.1f} |", flush=True)

    print(f"{machine()}\n\n{jobs:,} jobs in flight\n\n| | |\n|---|---|")
    async with chromium() as browser, busy(jobs, rate) as (service, url):
        while service.feed.newest < FIRST or service.status().unfinished < 0.9 * jobs:
            await asyncio.sleep(0.5)
        tell("service", await looks(service))
        if browser is None:
            print("no browser: apt-get install chromium")
            return
        for name, where in (("dashboard", "#/"), ("episodes", "#/episodes")):
            tell(name, await watched(browser, service, f"{url}/dashboard/{where}", seconds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5000, help="jobs in flight")
    parser.add_argument("--rate", type=float, default=200.0, help="jobs that end per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of measurement per page")
    options = parser.parse_args()
    run(bench(options.jobs, options.rate, options.seconds))


if __name__ == "__main__":
    main()
