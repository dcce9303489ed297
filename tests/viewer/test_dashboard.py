"""The pages of a service in a real browser: live updates, controls, and access."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.token_files import LocalToken
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.viewer.assets import POLICY
from tests.cli.conftest import SCRIPT
from tests.cli.test_scripted import scripted
from tests.cli.test_serve import serving as serving_by_hand
from tests.support.toy import ToyModel, ToyWorld, empty_node
from tests.viewer.test_pages import ATTACK, open_page

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-sixteen"
FINISH = [{"tool": "finish", "arguments": {}}]


class Watched:
    """A service over toy environments."""

    def __init__(self) -> None:
        self.world = ToyWorld()
        renderer = builtin_renderer()
        pool = ModelPool(lambda _: ToyModel(renderer, lambda *_: FINISH))
        pool.add("http://127.0.0.1:8000")
        families = {"toy": self.world.family()}
        self.service = RolloutService(
            empty_node(), families, renderer, pool, ServiceSettings(run=2, max_jobs_with_sandbox=4)
        )

    async def submit(self, name: str, samples: int = 1, **task: Any) -> None:
        row = {"id": "t", "instruction": "Do.", **task}
        await self.service.groups.submit(
            [GroupRequest(id=name, environment="toy", task=row, samples=samples)]
        )

    async def finish(self, name: str) -> None:
        while not (await self.service.groups.group(name, wait_s=60)).complete:
            pass


@pytest.fixture
async def watched() -> AsyncIterator[tuple[Watched, str]]:
    bench = Watched()
    async with serving(bench.service, ServerSettings(port=0, generate_token=False)) as url:
        yield bench, url
        for gate in bench.world.gates.values():
            gate.set()


async def test_the_pages_follow_the_service(chromium: Any, watched: tuple[Watched, str]) -> None:
    bench, url = watched
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit("step1/a", 6)
    async with open_page(chromium, f"{url}/dashboard") as page:
        await page.get_by_text("6 unfinished jobs").wait_for()
        run = page.get_by_role("meter", name="run pool")
        await page.wait_for_function("n => n.ariaValueNow === '2'", arg=await run.element_handle())
        await page.get_by_role("grid", name="Unfinished jobs").get_by_role("link", name="step1/a/0").click()
        await page.get_by_text("now in RUN").wait_for()  # its progress
        await page.get_by_role("region", name="user").get_by_text("Do.", exact=True).wait_for()
        bench.world.gates["call"].set()
        await page.locator(".verdict .big", has_text="1").wait_for()  # its outcome, without a reload
        await page.get_by_role("tab", name="Tokens").click()
        await page.locator(".segment.sampled .token").first.wait_for()
        await page.get_by_role("link", name="Service").click()
        await page.get_by_text("0 unfinished jobs").wait_for()
        await page.get_by_role("region", name="Groups").get_by_role("link").wait_for()
        await page.get_by_role("link", name="Episodes").click()
        await page.get_by_text("6 episodes").wait_for()
        await bench.submit("step1/b", 2)
        await page.get_by_text("8 episodes").wait_for()  # the list grows without a reload
        await page.get_by_label("Text in messages").fill("Mend it.")
        await page.keyboard.press("Enter")
        await page.get_by_text("0 episodes of 8").wait_for()
        await bench.submit("step1/c", 1, instruction="Mend it.")
        await page.get_by_text("1 episode of 9").wait_for()  # and so do the results of a search
        assert "step1/c/0" in await page.get_by_role("grid").inner_text()


@pytest.mark.thorough
async def test_a_service_without_jobs_shows_commands_that_work(chromium: Any, tmp_path: Path) -> None:
    with (
        scripted(tmp_path, "bash") as (_, options),
        serving_by_hand(tmp_path, "--llm", options[1]) as (url, _),
    ):
        async with RolloutClient(url) as client:
            link = await client.login_link()
        async with open_page(chromium, link) as page:
            empty = page.get_by_role("region", name="No jobs yet")
            await empty.locator("pre").nth(1).wait_for()
            commands = await empty.locator("pre").all_inner_texts()
            assert len(commands) == 2 and url in commands[0] and url in commands[1]
            path = f"{SCRIPT.parent}:{os.environ['PATH']}"
            for command in commands:
                done = await asyncio.to_thread(
                    subprocess.run, ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path},
                    capture_output=True, text=True, check=False, timeout=120,
                )  # fmt: skip
                assert done.returncode == 0 and '"error"' not in done.stdout, done.stderr + done.stdout
            await empty.wait_for(state="hidden")
            groups = page.get_by_role("region", name="Groups").get_by_role("link", name="greeting")
            await groups.nth(1).wait_for()  # one of each command


async def test_the_service_is_controlled_from_the_page(chromium: Any, watched: tuple[Watched, str]) -> None:
    bench, url = watched
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit("g", 3)
    async with open_page(chromium, f"{url}/dashboard") as page:
        await page.get_by_role("button", name="Limits").click()
        await page.get_by_label("Concurrent jobs in RUN").fill("3")
        await page.get_by_role("button", name="Set").click()
        await bench.world.until(lambda: bench.world.inside["call"] == 3)
        await page.get_by_role("button", name="Pause").click()
        await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
        await page.get_by_text("paused: finish").wait_for()
        await page.get_by_role("button", name="Resume").click()
        await page.get_by_role("button", name="Cancel g/1").click()
        await page.get_by_role("button", name="Cancel the job").click()
        await page.get_by_text("Cancelled.").wait_for()
        bench.world.gates["call"].set()
        await bench.finish("g")
        assert (await bench.service.groups.job("g/1")).state == "cancelled"
        await page.goto(f"{url}/dashboard#/episode/g%2F1")
        await page.get_by_role("button", name="Retry").click()
        await page.wait_for_url("**/dashboard/#/episode/g%3Aretry-1%2F0")
        await bench.finish("g:retry-1")
        await page.goto(f"{url}/dashboard#/")
        await page.get_by_role("button", name="Add …").click()
        await page.get_by_label("Base URL").fill("http://127.0.0.1:8001/v1")
        await page.get_by_role("button", name="Add", exact=True).click()
        await page.get_by_role("button", name="Drain http://127.0.0.1:8001").click()
        await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await page.get_by_text("Draining.").wait_for()
        assert [server.url for server in bench.service.model_servers.all().servers] == [
            "http://127.0.0.1:8000"
        ]


async def test_hostile_text_of_a_running_service_is_text(chromium: Any, watched: tuple[Watched, str]) -> None:
    bench, url = watched
    await bench.submit("g", 2, id=ATTACK, instruction=ATTACK, faults={"eval": "grader"})
    await bench.finish("g")
    async with open_page(chromium, f"{url}/dashboard") as page:
        await page.get_by_role("region", name="Groups").get_by_role("link").wait_for()
        assert await page.locator("main img, main script").count() == 0
        await page.evaluate("location.hash = '#/episode/g%2F0'")
        await page.get_by_role("heading", name="onerror").wait_for()
        assert await page.locator("main img, main script").count() == 0


async def test_a_login_link_signs_the_browser_in(chromium: Any) -> None:
    bench = Watched()
    async with serving(bench.service) as url, RolloutClient(url) as client:
        context = await chromium.new_context()
        page = await context.new_page()
        await page.goto(await client.login_link())
        await page.get_by_text("0 unfinished jobs").wait_for()
        assert page.url.partition("#")[0] == f"{url}/dashboard/"
        assert await page.evaluate("document.cookie") == "", "scripts cannot read it"
        await page.get_by_role("button", name="Pause").first.wait_for()
        another = await context.new_page()
        await another.goto(f"{url}/dashboard")
        await another.get_by_text("0 unfinished jobs").wait_for()
        await context.close()


async def test_the_token_is_asked_for_and_stays_in_the_tab(chromium: Any) -> None:
    bench = Watched()
    settings = ServerSettings(port=0, token=SecretStr(TOKEN))
    async with serving(bench.service, settings) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            assert (await http.get("/dashboard/")).headers["content-security-policy"] == POLICY
            assert (await http.get("/dashboard/pages.js")).status_code == 200
            assert (await http.get("/dashboard/secrets")).status_code == 404
            for path in ("dashboard", "summaries", "jobs", "search?text=a"):
                assert (await http.get(f"/v1/{path}")).status_code == 401
        context = await chromium.new_context()
        page = await context.new_page()
        await page.goto(f"{url}/dashboard")
        for token, heading in (("not-the-right-token", "not the service's"), (TOKEN, "0 unfinished jobs")):
            await page.get_by_label("Bearer token").fill(token)
            await page.keyboard.press("Enter")
            await page.get_by_text(heading).wait_for()
        assert TOKEN not in page.url
        assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        await context.close()


async def test_other_origins_cannot_change_anything(watched: tuple[Watched, str]) -> None:
    _, url = watched
    async with httpx.AsyncClient(base_url=url) as http:
        for origin in (
            "http://evil.example",
            "null",
            "https://127.0.0.1",
            url.replace("127.0.0.1", "localhost"),
        ):
            answer = await http.post("/v1/pause", headers={"Origin": origin, "Content-Type": "text/plain"})
            assert answer.status_code == 401, origin
        assert (await http.get("/v1/status")).json()["paused"] is None
        assert (await http.post("/v1/pause", headers={"Origin": url})).status_code == 200


async def test_the_state_says_that_there_are_new_summaries(watched: tuple[Watched, str]) -> None:
    bench, url = watched
    async with httpx.AsyncClient(base_url=url) as http:
        status = (await http.get("/v1/dashboard")).json()["status"]
        assert (status["state"], status["newest_cursor"]) == ("serving", 0)
        await bench.submit("g", 2)
        await bench.finish("g")
        while (await http.get("/v1/dashboard")).json()["status"]["newest_cursor"] < 2:
            pass  # the last snapshot is returned for half a second
        page = (await http.get("/v1/summaries?limit=1")).json()
        rest = (await http.get("/v1/summaries", params={"after": page["next"]})).json()
        fresh = page["summaries"] + rest["summaries"]
        assert sorted(one["job_id"] for one in fresh) == ["g/0", "g/1"]
        assert [one["cursor"] for one in fresh] == [1, 2] and rest["next"] == 2


async def test_a_lost_service_is_noticed_and_its_successor_is_followed(chromium: Any) -> None:
    context = await chromium.new_context()
    page = await context.new_page()
    light, settings = page.locator("#top .badge"), ServerSettings(port=0, generate_token=False)
    for first in (True, False):
        bench = Watched()
        async with serving(bench.service, settings) as url:
            settings = settings.model_copy(update={"port": int(url.rpartition(":")[2])})
            if first:
                await page.goto(f"{url}/dashboard#/episodes")
            await light.get_by_text("live").wait_for()
            name = "before" if first else "after"
            await bench.submit(name, 2 if first else 1)
            await page.get_by_role("grid").get_by_text(name).first.wait_for()
        await light.get_by_text("disconnected").wait_for()
    assert await page.get_by_text("1 episode,").count() == 1, "the new service has a new store"
    await context.close()


async def test_unfinished_jobs_and_limits(watched: tuple[Watched, str]) -> None:
    bench, url = watched
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit("g", 6)
    await bench.world.until(lambda: bench.world.inside["call"] == 2)
    async with httpx.AsyncClient(base_url=url) as http:
        jobs = (await http.get("/v1/jobs?limit=3")).json()
        assert [(job["state"], job["active"]) for job in jobs["jobs"]] == [
            ("run", True),
            ("run", True),
            ("run", False),
        ]
        assert jobs["total"] == 6 and jobs["jobs"][0]["turns"] == 1
        assert (await http.get("/v1/jobs?state=queued")).json()["total"] == 2
        partial = (await http.get("/v1/jobs/g/0/partial")).json()
        assert (partial["state"], partial["reward"]) == ("run", None) and partial["messages"][0][
            "content"
        ] == "Do."
        assert (await http.post("/v1/jobs/g/0/retry")).status_code == 409
        status = (
            await http.patch("/v1/limits", json={"run": 5, "max_jobs_with_sandbox": 5, "queue": 7})
        ).json()
        assert status["pools"]["run"]["limit"] == 5 and status["queue_limit"] == 7
        await bench.world.until(lambda: bench.world.inside["call"] == 5)
        assert (await http.patch("/v1/limits", json={"run": 0})).status_code == 422
        await http.patch("/v1/limits", json={"run": 1})
        assert bench.world.inside["call"] == 5, "what runs goes on"
    async with RolloutClient(url) as client:
        await client.cancel_group("g")


async def test_earlier_summaries_come_from_the_store(tmp_path: Path) -> None:
    renderer = builtin_renderer()
    told: list[list[tuple[str, int]]] = []
    for name in ("old", "new"):
        store = SqliteStore(tmp_path / "store.db")
        model = ToyModel(renderer, lambda *_: FINISH)
        service = RolloutService(empty_node(), {"toy": ToyWorld().family()}, renderer, model, store=store)
        auth = LocalToken()
        async with (
            serving(service) as url,
            RolloutClient(url) as client,
            httpx.AsyncClient(auth=auth) as http,
        ):
            row = {"id": "t", "instruction": "Do."}
            await client.submit([GroupRequest(id=name, environment="toy", task=row, samples=3)])
            await client.group(name, wait_s=30)
            told.append([])
            after, more = 0, True
            while more:  # as a page does
                page = (await http.get(f"{url}/v1/summaries?limit=2&after={after}")).json()
                told[-1] += [(one["group_id"], one["cursor"]) for one in page["summaries"]]
                after, more = page["next"], bool(page["summaries"])
        await store.aclose()
    old = [("old", 1), ("old", 2), ("old", 3)]
    assert told == [old, [*old, ("new", 4), ("new", 5), ("new", 6)]]
