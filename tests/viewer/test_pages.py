"""The pages of a file in a real browser: their content, safety against hostile text, and speed."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_envs.model.tokens.token_texts import token_texts
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.viewer.assets import POLICY
from prorl_envs.viewer.export import export_html
from prorl_envs.viewer.index import Index
from prorl_envs.viewer.offline import offline_app
from tests.viewer.conftest import PICTURE, call, result, written

pytestmark = pytest.mark.anyio

ATTACK = (
    "<img src=x onerror=\"window.pwned=1\"><script>window.pwned=1</script><svg onload='window.pwned=1'>"
    '</script></pre><a href="javascript:window.pwned=1">click</a>{{7*7}}<!-- '
    "\u2028 \u202e\x1b]8;;javascript:x\x07"
)


def hostile() -> Any:
    """Return an episode in which every text of a model, a tool, a task or a trainer attacks the page."""
    image = [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/spy.png"}},
        {"type": "image_url", "image_url": {"url": "data:text/html,<script>window.pwned=1</script>"}},
        {"type": "image_url", "image_url": {"url": 'data:image/svg+xml,<svg onload="window.pwned=1"/>'}},
        {"type": "text", "text": f"{ATTACK} {PICTURE} {ATTACK}"},
        {ATTACK: ATTACK},
    ]
    answer = {"role": "assistant", "content": ATTACK, "reasoning_content": ATTACK}
    command = json.dumps({"command": ATTACK, ATTACK: 1})
    return result(
        "x/0",
        task_id=ATTACK,
        environment=ATTACK,
        evidence={
            "checks": [{"name": ATTACK, "passed": False, ATTACK: ATTACK}],
            ATTACK: [ATTACK],
            "long" * 50: {"word" * 30: "said" * 40},
        },
        components={ATTACK: 0.5},
        metadata={ATTACK: {ATTACK: ATTACK}, "__proto__": {"x": 1}},
        tools=[{"type": "function", "function": {"name": ATTACK, "description": ATTACK}}],
        messages=[
            {"role": ATTACK, "content": ATTACK},
            {"role": "user", "content": image},
            {**answer, "tool_calls": [call(ATTACK, ATTACK, 1)]},
            {"role": "tool", "tool_call_id": "c1", "content": f"\x1b[31m{ATTACK}\x1b]0;not hidden"},
            {"role": "assistant", "content": None, "tool_calls": [call("bash", command, 2), 7]},
            {"role": "tool", "tool_call_id": "c2", "content": f"+++ b\n@@ -1 +1 @@\n+{ATTACK}"},
        ],
    )  # fmt: skip


@asynccontextmanager
async def open_page(chromium: Any, url: str, **options: Any) -> AsyncIterator[Any]:
    """Open a page at a URL. Fail if it has an error, or loads anything from another origin."""
    context = await chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(20_000)
    page, problems = await context.new_page(), []
    origin = url.rpartition("/")[0] if url.startswith("file:") else "/".join(url.split("/")[:3])

    def asked_for(wanted: str) -> None:
        if not wanted.startswith((origin, "data:")):
            problems.append(f"asked for {wanted}")

    def said_of(kind: str, text: str) -> None:
        # With a running service: a job may finish between two requests for it.
        late = "/dashboard" in url and text.endswith("404 (Not Found)")
        if kind in ("error", "warning") and not late:
            problems.append(text)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: said_of(said.type, said.text))
    page.on("request", lambda asked: asked_for(asked.url))
    try:
        await page.goto(url)
        yield page
        assert await page.evaluate("window.pwned") is None
    finally:
        await context.close()
        assert not problems


@asynccontextmanager
async def offline(path: Path) -> AsyncIterator[str]:
    index = Index(path)
    app = offline_app(index, "secret", partial(token_texts, builtin_renderer().decode))
    try:
        async with answering(app, last_requests_s=1, log_level="critical") as url:
            yield f"{url}/secret/"
    finally:
        index.close()


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """URL of the pages for a file with three groups, one of which is hostile."""
    samples = [result("g/0"), result("g/1", reward=0.0, stop_reason="turn_limit"), result("g/2", reward=0.5)]
    other = result(
        "h/0", environment="math", task_id="sum", messages=[{"role": "user", "content": "only here"}]
    )
    async with offline(written(tmp_path / "r.jsonl", *samples, other, hostile())) as url:
        yield url


async def test_an_episode_is_shown_as_a_conversation(chromium: Any, address: str) -> None:
    async with open_page(chromium, f"{address}#/episode/0") as page:
        turn = page.get_by_role("region", name="Turn 1")
        await turn.get_by_text("git diff", exact=True).wait_for()
        assert await turn.locator(".line.add").inner_text() == "+x = 2\n"
        second = page.get_by_role("region", name="Turn 2")
        assert await second.locator(".line.del").inner_text() == "-x = 1\n"
        assert await second.locator(".ansi-fg-1").inner_text() == "red"
        assert await page.get_by_role("table", name="Time by step").get_by_role("row").count() == 8
        assert await page.locator(".verdict .big").inner_text() == "1"
        await page.get_by_role("tab", name="Tokens").click()
        sampled = page.locator("#tokens-1 .token")
        await sampled.first.wait_for()
        assert await sampled.all_inner_texts() == token_texts(builtin_renderer().decode, [76, 77, 78])
        assert [re.findall(r"p\d", await token.get_attribute("class")) for token in await sampled.all()] == [
            ["p5"], ["p2"], ["p0"],
        ]  # fmt: skip
        await page.locator("#tokens-1 .token-text").focus()
        await page.keyboard.press("ArrowRight")
        assert "id 76" in await page.locator(".token-info").inner_text()


async def test_hostile_text_is_text(chromium: Any, address: str) -> None:
    async with open_page(chromium, f"{address}#/episode/4") as page:
        await page.get_by_role("heading", name="onerror").wait_for()
        folded = page.locator("details:not([open]) > summary:visible")
        while await folded.count():
            await folded.first.click()
        assert await page.locator("main img").count() == 1, "the one picture that is in the data"
        assert await page.locator("main script, main a:not([href^='#']), main svg").count() == 0
        shown = await page.locator("#panel").inner_text()
        assert ATTACK[:40] in shown and "\\x202e" in shown and "127.0.0.1:1/spy.png" in shown
        assert "not hidden" in shown
        for tab in ("Tokens", "JSON"):
            await page.get_by_role("tab", name=tab).click()
            await page.locator(".tokens, .json").wait_for()
        await page.evaluate("location.hash = '#/episodes?q=onerror'")
        await page.get_by_role("row").nth(1).wait_for()
        assert ATTACK[:20] in await page.get_by_role("grid").inner_text()
        await page.evaluate("location.hash = '#/group/x'")
        await page.locator(".compare-grid").wait_for()
        assert await page.locator("main img").count() == 0


async def test_lists_are_searched_sorted_and_walked_by_keyboard(chromium: Any, address: str) -> None:
    async with open_page(chromium, address) as page:
        grid = page.get_by_role("grid", name="Episodes")
        rows = grid.locator(".row")
        await page.get_by_text("5 episodes").wait_for()
        await page.keyboard.press("/")
        await page.keyboard.type("reward<1 g/")
        await page.get_by_text("2 episodes of 5").wait_for()
        await page.get_by_label("Filter", exact=True).fill("")
        await page.get_by_label("Text in messages").fill("only here")
        await page.keyboard.press("Enter")
        await page.get_by_text("1 episode of 5").wait_for()
        assert "h/0" in await rows.inner_text()
        await page.reload()
        await page.get_by_text("1 episode of 5").wait_for()  # the address has the filter
        await page.goto(f"{address}#/episodes?env=bash&sort=reward")
        assert [await cell.inner_text() for cell in await rows.locator(".chip").all()] == ["0", "0.5", "1"]
        await grid.focus()
        await page.keyboard.press("End")
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="fix-it").wait_for()
        assert page.url.endswith("#/episode/2?env=bash&sort=reward")
        await page.keyboard.press("p")
        await page.get_by_text("turn limit").wait_for()


async def test_samples_of_a_group_are_side_by_side(chromium: Any, address: str) -> None:
    async with open_page(chromium, f"{address}#/group/g") as page:
        await page.locator(".compare-head").nth(2).wait_for()
        await page.get_by_label("sample 2").uncheck()
        await page.locator(".compare-head").nth(2).wait_for(state="detached")
        assert await page.locator(".compare-cell").count() == 4
        assert "contributes a gradient" in await page.locator("main").inner_text()


#: Pages, and an element that shows that they are drawn.
WHERE = {"#/episode/4": ".verdict .evidence", "#/group/g": ".compare-grid", "#/episodes": ".list .row"}


async def test_names_landmarks_and_a_narrow_window(chromium: Any, address: str) -> None:
    async with open_page(
        chromium, f"{address}#/episode/0", viewport={"width": 380, "height": 700}, reduced_motion="reduce"
    ) as page:
        await page.get_by_role("region", name="Turn 1").wait_for()
        for role in ("banner", "main", "navigation", "complementary"):
            assert await page.get_by_role(role).count() >= 1, role
        named = "n => n.ariaLabel || n.innerText.trim() || n.labels?.length"
        assert await page.evaluate(f"[...document.querySelectorAll('button, a, input')].every({named})")
        for where, shown in WHERE.items():  # one of them with long words in everything
            await page.evaluate(f"location.hash = '{where}'")
            await page.locator(shown).first.wait_for()
            assert await page.evaluate("document.documentElement.scrollWidth") <= 380, where
            levels = await page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(n => +n.tagName[1])")
            assert levels[0] == 1, f"{where} has no name"
            assert all(below - above <= 1 for above, below in pairwise(levels)), f"{where}: {levels}"
            cut = await page.evaluate(
                "[...document.querySelectorAll('.verdict *')].every("
                "n => n.getBoundingClientRect().right <= n.closest('section').getBoundingClientRect().right)"
            )
            assert cut, f"{where}: what speaks for a reward goes beyond its panel"
        await page.evaluate("location.hash = '#/episode/0'")
        await page.reload()  # a list takes the focus when it opens
        await page.get_by_role("region", name="Turn 1").wait_for()
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"


async def test_ten_thousand_episodes_use_few_rows_of_the_page(chromium: Any, tmp_path: Path) -> None:
    line = result("g/0").model_dump_json()
    path = tmp_path / "many.jsonl"
    path.write_text("".join(line.replace('"g/0"', f'"g/{n}"', 1) + "\n" for n in range(10_000)))
    async with offline(path) as url, open_page(chromium, url) as page:
        await page.get_by_text("10,000 episodes").wait_for()
        assert await page.locator(".list .row").count() < 60
        await page.get_by_role("grid").focus()
        await page.keyboard.press("End")
        await page.get_by_role("link", name="g/9999").wait_for()
        assert await page.locator(".list .row").count() < 60


async def test_an_exported_file_is_self_contained(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    lines = [one.model_dump_json().encode() for one in (result("g/0"), hostile())]
    path.write_bytes(export_html(lines, f"r {ATTACK}", partial(token_texts, builtin_renderer().decode)))
    async with open_page(chromium, f"{path.as_uri()}") as page:
        await page.get_by_text("2 episodes").wait_for()
        await page.get_by_label("Text in messages").fill("Let me look.")
        await page.keyboard.press("Enter")
        await page.get_by_text("1 episode of 2").wait_for()
        await page.evaluate("location.hash = '#/episode/1'")
        await page.get_by_role("heading", name="onerror").wait_for()
        await page.evaluate("location.hash = '#/episode/0'")
        await page.get_by_role("region", name="Turn 2").wait_for()
        await page.get_by_role("tab", name="Tokens").click()
        assert await page.locator("#tokens-1 .token").count() == 3


async def test_without_the_secret_link_there_is_no_access(address: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{address}api/episodes/0")
        assert answer.status_code == 200 and answer.headers["content-security-policy"] == POLICY
        for path in ("", "api/episodes", "api/episodes/0", "style.css"):
            assert (await client.get(f"{address.replace('secret', 'guess')}{path}")).status_code == 404
        for path in ("../page.html", "page.html", "api/search?text=", "api/episodes/-1", "api/episodes/99"):
            assert (await client.get(f"{address}{path}")).status_code in (404, 422)
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY


def episode_of_commands(job: str, reward: float | None, *steps: tuple[str, str]) -> Any:
    """Return an episode whose turns run these commands, each with its output."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for number, (arguments, output) in enumerate(steps):
        calls = [call("bash", arguments, number)]
        messages += [
            {"role": "assistant", "content": f"Step {number} of {job}.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{number}", "content": output},
        ]
    return result(job, reward=reward, messages=messages)


LS, TWO = '{"command": "ls"}', '{"command": "a", "timeout": 1}'


async def _columns(page: Any) -> list[tuple[str, list[str]]]:
    """Return the columns of the comparison, from left to right: sample, and marks of its cells."""
    heads = await page.locator(".compare-head a").all_inner_texts()
    cells = await page.locator(".compare-cell").all()
    marks = [" ".join(await cell.locator(".badge").all_inner_texts()) for cell in cells]
    return [(head, marks[column :: len(heads)]) for column, head in enumerate(heads)]


async def test_a_group_is_compared_from_best_to_worst(chromium: Any, tmp_path: Path) -> None:
    rewards = [0.5, 0.5, 0.25, 1.0, 0.5, 0.0, 0.75, None]
    samples = [episode_of_commands(f"g/{n}", reward, (LS, "")) for n, reward in enumerate(rewards)]
    async with (
        offline(written(tmp_path / "r.jsonl", *samples)) as url,
        open_page(chromium, f"{url}#/group/g") as page,
    ):
        await page.locator(".compare-head").nth(3).wait_for()
        assert [name for name, _ in await _columns(page)] == ["sample 3", "sample 6", "sample 2", "sample 5"]
        await page.get_by_label("sample 7").check()  # no reward: after all that have one
        await page.locator(".compare-head").nth(4).wait_for()
        assert [name for name, _ in await _columns(page)][-1] == "sample 7"


async def test_a_comparison_shows_markdown(chromium: Any, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "It is **two**.\n\n- one <b>raw</b>\n\n`code`"},
    ]
    samples = [result(f"g/{n}", messages=messages) for n in range(2)]
    async with (
        offline(written(tmp_path / "r.jsonl", *samples)) as url,
        open_page(chromium, f"{url}#/group/g") as page,
    ):
        cells = page.locator(".compare-cell .markdown")
        await cells.nth(1).wait_for()
        assert await cells.locator("strong").all_inner_texts() == ["two", "two"]
        assert await cells.locator("li").all_inner_texts() == ["one <b>raw</b>"] * 2
        assert await cells.locator("code").all_inner_texts() == ["code", "code"]


async def test_differences_between_samples_are_marked(chromium: Any, tmp_path: Path) -> None:
    same = ('{"timeout": 1, "command": "a"}', "ok")  # the order of arguments is ignored
    samples = [
        episode_of_commands("g/0", 1.0, (LS, "x"), (TWO, "ok")),
        episode_of_commands("g/1", 0.9, (LS, "x"), same, (LS, "x")),  # continues where most have ended
        episode_of_commands("g/2", 0.1, (LS, "y"), same),  # the same command, another output
        episode_of_commands(
            "g/3", 0.0, ('{"command": "rm"}', "x")
        ),  # another command; ends where most continue
        episode_of_commands("h/0", 1.0, (LS, "x")),
        episode_of_commands("h/1", 0.0, ('{"command": "rm"}', "x")),
    ]
    async with (
        offline(written(tmp_path / "r.jsonl", *samples)) as url,
        open_page(chromium, f"{url}#/group/g") as page,
    ):
        await page.locator(".compare-head").nth(3).wait_for()
        assert await _columns(page) == [
            ("sample 0", ["", "", ""]),
            ("sample 1", ["", "", "differs"]),
            ("sample 2", ["output differs", "", ""]),
            ("sample 3", ["differs", "differs", ""]),
        ]
        await page.evaluate("location.hash = '#/group/h'")  # with two samples, neither is the usual one
        await page.locator(".compare-head").nth(2).wait_for(state="detached")
        assert await _columns(page) == [("sample 0", ["differs"]), ("sample 1", ["differs"])]
