"""Every page in a real browser: axe-core (https://github.com/dequelabs/axe-core) finds no serious fault.

axe rates a violation as minor, moderate, serious or critical. The last two are not accepted in any page, in
light and dark, on a wide screen and on a phone's.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.token_texts import token_texts
from prorl_envs.rollout.http.server import answering, serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.viewer.export import export_html
from prorl_envs.viewer.offline import runs_app
from prorl_envs.viewer.runs import RunsFolder
from tests.support.toy import ToyModel, empty_node
from tests.viewer.conftest import result
from tests.viewer.test_dashboard import FINISH, Watched
from tests.viewer.test_dashboard import watched as watched
from tests.viewer.test_pages import open_page
from tests.viewer.test_run_pages import finished as finished
from tests.viewer.test_run_pages import viewing

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "screen",
        [
            pytest.param(
                {"color_scheme": scheme, "viewport": {"width": width, "height": 860}}, id=f"{scheme}-{width}"
            )
            for scheme in ("light", "dark")
            for width in (1400, 390)
        ],
    ),
]


async def check(page: Any) -> None:
    """Fail if the shown page has a serious violation; name each with its first elements."""
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="axe is not installed").Axe()
    problems = [
        f"{found['id']}: {found['help']}: {[node['html'][:200] for node in found['nodes'][:3]]}"
        for found in (await axe.run(page)).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]
    assert problems == [], page.url


async def test_an_overview_and_lists(chromium: Any, finished: Path, screen: dict[str, Any]) -> None:
    async with viewing(finished) as url, open_page(chromium, url, **screen) as page:
        await page.get_by_role("heading", name="Run r").wait_for()
        await check(page)
        for place in ("#/episodes", "#/episodes?view=groups", "#/episodes?text=nothing"):
            await page.goto(f"{url}{place}")
            await page.get_by_role("grid").first.wait_for()
            await check(page)
        await page.keyboard.press("?")
        await page.get_by_role("dialog").wait_for()
        await check(page)


async def test_every_tab_of_an_episode(chromium: Any, finished: Path, screen: dict[str, Any]) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episode/0", **screen) as page:
        tabs = page.get_by_role("tab")
        await tabs.first.wait_for()
        assert await tabs.count() > 3
        for tab in await tabs.all():
            await tab.click()
            await check(page)
        await tabs.first.click()
        await page.get_by_label("One line per turn").check()
        await page.get_by_label("Find in this episode").fill("look")
        await check(page)


async def test_prompts_with_markdown_and_a_comparison(
    chromium: Any, finished: Path, screen: dict[str, Any]
) -> None:
    async with viewing(finished) as url, open_page(chromium, f"{url}#/episode/1", **screen) as page:
        await page.get_by_role("tab").first.wait_for()
        await check(page)
        await page.get_by_role("link", name="compare").click()
        await page.locator(".chip").first.wait_for()
        await check(page)


async def test_the_list_of_runs(chromium: Any, finished: Path, screen: dict[str, Any]) -> None:
    async with (
        runs_app(RunsFolder(finished.parent), "secret") as app,
        answering(app, last_requests_s=1, log_level="critical") as url,
        open_page(chromium, f"{url}/secret/", **screen) as page,
    ):
        await page.locator(".row").first.wait_for()
        await check(page)


async def test_a_dashboard(chromium: Any, watched: tuple[Watched, str], screen: dict[str, Any]) -> None:
    bench, url = watched
    async with open_page(chromium, f"{url}/dashboard", **screen) as page:
        await page.get_by_role("region", name="No jobs yet").wait_for()
        await check(page)
        bench.world.gates["call"] = asyncio.Event()
        await bench.submit("step1/a", 6)
        await page.get_by_text("6 unfinished jobs").wait_for()
        await check(page)
        await page.get_by_role("button", name="Limits").click()
        await check(page)


async def test_signing_in(chromium: Any, screen: dict[str, Any]) -> None:
    renderer = builtin_renderer()
    pool = ModelPool(lambda _: ToyModel(renderer, lambda *_: FINISH))
    service = RolloutService(empty_node(), {}, renderer, pool, ServiceSettings())
    settings = ServerSettings(port=0, token=SecretStr("a-token-of-sixteen"))
    async with serving(service, settings) as url:
        context = await chromium.new_context(**screen)
        try:
            page = await context.new_page()
            await page.goto(f"{url}/dashboard")
            await page.get_by_role("dialog").wait_for()
            await check(page)
        finally:
            await context.close()


async def test_one_file_with_tokens(chromium: Any, tmp_path: Path, screen: dict[str, Any]) -> None:
    path = tmp_path / "out.html"
    text_of = partial(token_texts, builtin_renderer().decode)
    path.write_bytes(export_html([result("g/0").model_dump_json().encode()], "r", text_of))
    async with open_page(chromium, path.as_uri(), **screen) as page:
        await page.evaluate("location.hash = '#/episode/0'")
        await page.get_by_role("tab", name="Tokens").click()
        await page.locator(".token").first.wait_for()
        await check(page)
