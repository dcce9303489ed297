"""The pages of runs in a real browser: overview, list of runs, live updates, keyboard, links, Markdown."""

import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.http.server import answering
from prorl_envs.runs.folder import RunDescription, RunFolder
from prorl_envs.runs.statistics import RunSummary, by_environment, statistics_of
from prorl_envs.viewer.export import export_html
from prorl_envs.viewer.index import Index
from prorl_envs.viewer.offline import offline_app, runs_app
from prorl_envs.viewer.runs import RunsFolder, RunView
from tests.viewer.conftest import DIFF, result
from tests.viewer.test_pages import open_page

pytestmark = pytest.mark.anyio

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_tokens=512, seed=3)
LONG = "a-task-with-a-long-name__whose-middle-is-of-no-interest-12345"
HOSTILE = (
    '# Title\n\n<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\n\n'
    "[web](https://web.example/page) [bad](javascript:window.pwned=1) ![spy](http://127.0.0.1:1/spy.png)\n\n"
    "```js\nwindow.pwned=1\n```\n\n- [x](data:text/html,<script>window.pwned=1</script>)\n"
)


def groups() -> list[GroupRequest]:
    rows = [("r/a", "bash@bare", {"id": LONG, "secret": "in the row"}), ("r/b", "math", {"id": "sum"})]
    return [
        GroupRequest(id=name, environment=environment, task=row, samples=2, sampling=SAMPLING)
        for name, environment, row in rows
    ]  # fmt: skip


def results() -> list[Any]:
    first = {"environment": "bash@bare", "task_id": LONG}
    second = {"environment": "math", "task_id": "sum", "evidence": {}}
    evidence = {
        "patch": DIFF,
        "fail_to_pass": {"tests/a.py::one": "FAILED"},
        "pass_to_pass": {"tests/a.py::two": "PASSED"},
        "checks": [{"name": "exists", "passed": True, "path": "a.py"}],
        "log_tail": "collected 2 items\n",
    }
    said = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    return [
        result("r/a/0", reward=1.0, evidence=evidence, **first),
        result("r/a/1", reward=0.0, messages=said, **first),
        result("r/b/0", reward=0.25, **second),
        result("r/b/1", reward=0.75, **second),
    ]


def create(path: Path, model: str = "m-7b") -> RunFolder:
    description = RunDescription(
        name="r", environment="bash@bare", model=model, started="2026-11-25T12:30:00+00:00", version="1.2.3"
    )
    return RunFolder.create(path, description, groups())


def summarise(folder: RunFolder) -> RunSummary:
    summary = RunSummary(
        environment="bash@bare",
        model="m-7b",
        started="2026-11-25T12:30:00+00:00",
        expected=4,
        wall_s=12.0,
        sampled_tokens_per_s=34.0,
        overall=statistics_of(folder.summaries.values()),
        environments=by_environment(folder.summaries.values()),
    )
    folder.save_summary(summary)
    return summary


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "finished"
    with create(path) as folder:
        for one in results():
            folder.append(one)
        summarise(folder)
    return path


@asynccontextmanager
async def viewing(path: Path) -> AsyncIterator[str]:
    index = Index(path / "results.jsonl")
    try:
        app = offline_app(index, "secret", None, RunView(path))
        async with answering(app, last_requests_s=1, log_level="critical") as url:
            yield f"{url}/secret/"
    finally:
        index.close()


async def test_the_overview_has_the_numbers_of_the_summary(chromium: Any, finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    overall = summary["overall"]
    async with viewing(finished) as url, open_page(chromium, url) as page:
        await page.get_by_role("heading", name="Run r").wait_for()
        tile = page.get_by_role("region", name="Mean reward")
        shown = f"{overall['mean_reward']:.3f} ± {overall['standard_error']:.3f}"
        assert shown in " ".join((await tile.inner_text()).split())
        for k in ("1", "2"):
            text = await page.get_by_role("region", name=f"pass@{k}").inner_text()
            assert f"{overall['pass_at'][k] * 100:.1f}%" in text
        rows = page.locator("table.statistics tbody tr")
        assert await rows.count() == 3
        for row, name in ((rows.nth(0), "bash@bare"), (rows.nth(1), "math")):
            one, text = summary["environments"][name], await row.inner_text()
            assert text.startswith(name) and f"{one['mean_reward']:.3f}" in text
            assert f"{one['tokens']}" in text and f"{one['pass_at']['1'] * 100:.1f}%" in text
        facts = await page.locator(".overview .facts").inner_text()
        for known in (
            "model m-7b",
            "2026-11-25 12:30 UTC",
            "4 of 4 episodes",
            "12 s of wall time",
            "34 sampled",
        ):
            assert known in facts
        names = [
            await chart.get_attribute("aria-label") or ""
            for chart in await page.locator(".histogram svg").all()
        ]
        kinds = ["reward", "turns", "tokens", "time"]
        assert [re.findall(r"^histogram of (\w+)", name) for name in names] == [[kind] for kind in kinds]
        assert "0: 1" in names[0] and "0.2: 1" in names[0] and "0.7: 1" in names[0] and "0.9: 1" in names[0]
        await page.get_by_label("Environment of the histograms").select_option("math")
        await page.get_by_text("mean 0.5, 2 episodes").wait_for()
        await page.get_by_role("link", name="math").click()
        await page.get_by_text("2 episodes of 4").wait_for()


async def test_a_run_in_progress_is_updated(chromium: Any, tmp_path: Path) -> None:
    first, *others = results()
    with create(tmp_path / "run") as folder:
        folder.append(first)
        async with viewing(tmp_path / "run") as url, open_page(chromium, url) as page:
            await page.get_by_text("1 of 4 episodes").wait_for()
            await page.get_by_text("running", exact=True).wait_for()
            folder.append(others[0])
            await page.get_by_text("2 of 4 episodes").wait_for()
            await page.get_by_role("link", name="Episodes").click()
            await page.get_by_text("2 episodes").wait_for()
            folder.append(others[1])
            await page.get_by_text("3 episodes").wait_for()
            folder.close()
            await page.get_by_role("link", name="Overview").click()
            await page.get_by_text("3 of 4 episodes: the run was interrupted").wait_for()


async def test_the_runs_of_a_folder_are_listed(chromium: Any, finished: Path) -> None:
    runs = finished.parent
    (runs / "latest").symlink_to("finished")
    with create(runs / "other", "m-8b") as folder:
        folder.append(results()[0])
        async with (
            runs_app(RunsFolder(runs), "secret") as app,
            answering(app, last_requests_s=1, log_level="critical") as url,
        ):
            async with open_page(chromium, f"{url}/secret/") as page:
                rows = page.get_by_role("grid", name="Runs").locator(".row")
                await rows.nth(1).wait_for()
                texts = {text.split()[0]: text for text in await rows.all_inner_texts()}
                assert set(texts) == {"finished", "other"}, "a link is no further run"
                assert "0.500 ± " in texts["finished"] and "4 of 4" in texts["finished"]
                assert "running" in texts["other"] and "1 of 4" in texts["other"] and "m-8b" in texts["other"]
                at = [text.split()[0] for text in await rows.all_inner_texts()].index("finished")
                for _ in range(at):
                    await page.keyboard.press("ArrowDown")  # the list has the focus
                await page.keyboard.press("Enter")
                await page.get_by_role("heading", name="Run r").wait_for()
                assert page.url.endswith("/run/finished/")
                await page.get_by_role("link", name="Runs").click()
                await rows.nth(1).wait_for()
            async with open_page(chromium, f"{url}/secret/run/other/#/episodes") as page:
                await page.get_by_text("1 episode", exact=False).first.wait_for()


def is_open(path: Path) -> bool:
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return any(os.path.realpath(link) == str(path.resolve()) for link in links)


async def test_the_results_of_opened_runs_are_closed_with_the_pages(finished: Path) -> None:
    results_file = finished / "results.jsonl"
    async with runs_app(RunsFolder(finished.parent), "secret") as app:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pages") as client:
            answer = await client.get("/secret/run/finished/api/episodes")
        assert len(answer.json()["entries"]) == 4 and is_open(results_file)
    assert not is_open(results_file)


async def test_lists_are_used_with_only_the_keyboard(chromium: Any, finished: Path) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episodes") as page:
        grid = page.get_by_role("grid", name="Episodes")
        await grid.locator(".row").nth(3).wait_for()
        focused = "(n => n.ariaLabel || n.id || n.innerText)(document.activeElement)"
        assert await page.evaluate(focused) == "Episodes", "the list has the focus when the page opens"
        await page.keyboard.press("?")
        await page.get_by_role("dialog", name="Keys").wait_for()
        await page.keyboard.press("Escape")
        await page.get_by_role("dialog").wait_for(state="detached")
        for key in ("ArrowDown", "Enter"):
            await page.keyboard.press("/")
            assert await page.evaluate(focused) == "filter"
            await page.keyboard.press(key)
            assert await page.evaluate(focused) == "Episodes", key
        await page.keyboard.press("Tab")
        assert await page.evaluate(focused) == "Reward"
        await page.keyboard.press("Enter")
        await (
            page.get_by_role("columnheader", name="Reward")
            .and_(page.locator("[aria-sort=descending]"))
            .wait_for()
        )
        assert "Reward" in await page.evaluate(focused), "the header keeps the focus"
        await page.keyboard.press("Enter")
        await page.locator("[aria-sort=ascending]").wait_for()
        assert [await chip.inner_text() for chip in await grid.locator(".chip").all()] == [
            "0",
            "0.25",
            "0.75",
            "1",
        ]


async def test_an_id_is_shortened_in_its_middle(chromium: Any, finished: Path) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episodes") as page:
        cell = page.locator(".list .middle").first
        await cell.wait_for()
        assert await cell.inner_text() == LONG and await cell.get_attribute("title") == LONG
        right = "getBoundingClientRect().right"
        ends = f"n => n.lastChild.{right} <= n.closest('.cell').{right} + 1"
        assert await cell.evaluate(ends), "its end is in sight"
        assert await cell.evaluate("n => n.firstChild.scrollWidth > n.firstChild.clientWidth")


async def test_links_to_turns_and_the_filtered_list(chromium: Any, finished: Path) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episode/0#turn-2") as page:
        await page.locator("#turn-2:focus").wait_for()
        await page.get_by_role("link", name="Turn 1").click()
        await page.locator("#turn-1:focus").wait_for()
        await page.keyboard.press("j")
        assert page.url.endswith("#/episode/0#turn-2")
        await page.goto(f"{url}#/episodes?env=math&sort=reward&desc=1")
        await page.get_by_text("2 episodes of 4").wait_for()
        await page.keyboard.press("Enter")
        steps = page.get_by_role("navigation", name="Filtered episodes")
        await steps.get_by_text("1 of 2").wait_for()
        assert await page.locator(".verdict .big").inner_text() == "0.75"
        await page.keyboard.press("]")
        await steps.get_by_text("2 of 2").wait_for()
        assert await page.locator(".verdict .big").inner_text() == "0.25"
        await steps.get_by_role("link", name="Previous").click()
        await steps.get_by_text("1 of 2").wait_for()
        await page.keyboard.press("u")
        await page.get_by_text("2 episodes of 4").wait_for()


async def test_hostile_markdown_runs_nothing_and_loads_nothing(
    chromium: Any, finished: Path, tmp_path: Path
) -> None:
    lines = [one.model_dump_json().encode() for one in results()]
    exported = tmp_path / "out.html"
    exported.write_bytes(export_html(lines, "r", None, RunView(finished)))
    async with viewing(finished) as url:
        for address in (url, exported.as_uri()):
            async with open_page(chromium, address) as page:
                await page.evaluate("location.hash = '#/episode/1'")
                await (
                    page.get_by_role("region", name="Turn 1").get_by_role("heading", name="Title").wait_for()
                )
                for scope in (".said.user .markdown", ".turn .markdown"):
                    block = page.locator(scope)
                    assert await block.locator("script, img, iframe, svg").count() == 0
                    shown = await block.inner_text()
                    assert (
                        "<script>window.pwned=1</script>" in shown and "http://127.0.0.1:1/spy.png" in shown
                    )
                    [link] = await block.locator("a").all()
                    assert await link.get_attribute("href") == "https://web.example/page"
                    assert "noopener" in (await link.get_attribute("rel") or "")
                    assert await link.get_attribute("target") == "_blank"
                    assert await block.locator("pre").inner_text() == "window.pwned=1"
                await page.get_by_label("Show texts without Markdown").check()
                await page.locator(".turn .prose", has_text="# Title").wait_for()
                assert await page.locator(".markdown").count() == 0


async def test_patch_tests_and_metadata(chromium: Any, finished: Path) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episode/0") as page:
        side = page.get_by_role("complementary")
        details = await side.inner_text()
        for known in (
            "bare",
            "m-7b",
            "2026-11-25 12:30 UTC",
            "temperature 0.7, top-p 0.9",
            "512 tokens per turn, seed 3",
        ):
            assert known in details, known
        await side.get_by_text("Task row").click()
        await side.get_by_text("in the row").wait_for()
        await page.get_by_role("tab", name="Patch and tests").click()
        grade = page.locator(".grade")
        assert await grade.locator(".line.add").inner_text() == "+x = 2\n"
        await grade.get_by_text("fail to pass: 0 of 1 passed").wait_for()
        await grade.get_by_text("tests/a.py::two").wait_for()
        await grade.get_by_text("collected 2 items").wait_for()
        await grade.get_by_text("exists").wait_for()
        box, main = await grade.bounding_box(), await page.locator(".episode").bounding_box()
        assert box and main and box["width"] > 0.9 * main["width"], "it has the full width"


async def test_runs_are_filtered_and_sorted(chromium: Any, finished: Path) -> None:
    runs = finished.parent
    create(runs / "a-first", "m-8b").close()
    create(runs / "z-last", "m-8b").close()
    async with (
        runs_app(RunsFolder(runs), "secret") as app,
        answering(app, last_requests_s=1, log_level="critical") as url,
        open_page(chromium, f"{url}/secret/") as page,
    ):
        names = page.get_by_role("grid", name="Runs").locator(".row .cell:first-child")
        await names.nth(2).wait_for()
        for descending in ("ascending", "descending"):
            await page.get_by_role("button", name="Run", exact=True).click()
            await page.locator(f"[aria-sort={descending}]").wait_for()
            expected = ["a-first", "finished", "z-last"]
            assert await names.all_inner_texts() == expected[:: 1 if descending == "ascending" else -1]
        await page.get_by_role("button", name="Mean reward").click()
        await page.locator("[aria-sort=descending]", has_text="Mean reward").wait_for()
        assert (await names.all_inner_texts())[0] == "finished"
        await page.keyboard.press("/")
        await page.keyboard.type("M-8B last")
        await page.get_by_text("1 of 3 runs").wait_for()
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Run r").wait_for()
        assert page.url.endswith("/run/z-last/")


async def test_failures_say_why_and_lead_to_their_episodes(chromium: Any, tmp_path: Path) -> None:
    failure = {"kind": "model", "stage": "run", "message": "the server answered 500", "hint": ""}
    path = tmp_path / "failed"
    with create(path) as folder:
        for one in (*results()[:2], result("r/b/0", state="failed", reward=None, failure=failure)):
            folder.append(one)
    async with viewing(path) as url, open_page(chromium, url) as page:
        await page.get_by_role("region", name="Failures").last.get_by_role("link", name="model").click()
        await page.get_by_text("1 episode of 3").wait_for()
        row = page.get_by_role("grid").locator(".row")
        assert await row.get_by_text("the server answered 500").is_visible()
        await page.goto(f"{url}#/episodes?q=answered")
        await page.get_by_text("1 episode of 3").wait_for()
        field = page.get_by_label("Filter", exact=True)
        await field.fill("turn>1")
        await page.get_by_text("“turn>1” is not a comparison.").wait_for()
        await field.fill("turns>1")
        await page.get_by_text("is not a comparison").wait_for(state="hidden")
