"""The page of an episode in a real browser: reasons of a reward, search, copies, print."""

from pathlib import Path
from typing import Any

import pytest

from prorl_envs.rollout.api.types import Result
from prorl_envs.viewer.export import export_html
from tests.viewer.conftest import call, result, written
from tests.viewer.test_pages import offline, open_page

pytestmark = pytest.mark.anyio


async def test_failed_checks_show_their_details(chromium: Any, tmp_path: Path) -> None:
    checks = [
        {"name": "exists", "passed": True, "path": "found.csv"},
        *({"name": f"equals-{n}", "passed": False, "problem": f"problem {n}"} for n in range(5)),
    ]
    one = result(reward=0.0, evidence={"checks": checks})
    async with (
        offline(written(tmp_path / "r.jsonl", one)) as url,
        open_page(chromium, f"{url}#/episode/0") as page,
    ):
        side = page.get_by_role("complementary")
        await side.get_by_text("problem 2").wait_for()
        assert not await side.get_by_text("found.csv").is_visible()
        assert not await side.get_by_text("problem 3").is_visible(), "the first three are open"


async def test_a_turn_shows_its_prompt_length_and_short_reasoning(chromium: Any, tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "One.", "reasoning_content": "a short thought"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "a long thought " * 100},
    ]
    async with (
        offline(written(tmp_path / "r.jsonl", result(messages=said))) as url,
        open_page(chromium, f"{url}#/episode/0") as page,
    ):
        second = page.get_by_role("region", name="Turn 2")
        await second.get_by_role("heading", name="Turn 2 of 2").wait_for()
        facts = await second.locator(".facts").inner_text()
        assert "9 tokens read" in facts and "3 sampled" in facts
        assert await page.get_by_text("a short thought").is_visible()
        assert not await second.get_by_text("a long thought").is_visible()


async def test_a_text_is_found_in_an_episode(chromium: Any, tmp_path: Path) -> None:
    output = "\n".join(f"line {n}" for n in range(500))
    said: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for number in range(4):
        calls = [call("bash", '{"command": "run"}', number)]
        said += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{number}", "content": output if number % 2 else "Needle"},
        ]
    marked = "CSS.highlights.get('found').size"
    inside = "[...CSS.highlights.get('found')][0].getBoundingClientRect().top"
    path = written(tmp_path / "r.jsonl", result(messages=said))
    async with offline(path) as url, open_page(chromium, f"{url}#/episodes") as page:
        await page.get_by_label("Text in messages").fill("line 321")
        await page.keyboard.press("Enter")
        await page.get_by_text("1 episode, ").wait_for()
        await page.get_by_role("grid").focus()
        await page.keyboard.press("Enter")
        found = page.get_by_role("search").get_by_role("button")
        await found.nth(1).wait_for()
        assert await found.all_inner_texts() == ["turn 2", "turn 4"]
        assert await found.first.get_attribute("aria-current") == "true", "the first place is shown"
        assert await page.evaluate(marked) == 1, "the second output is still folded"
        assert 0 < await page.evaluate(inside) < 800, "it is in sight"
        await page.keyboard.press("f")
        await page.keyboard.press("Enter")
        await page.locator(".hits button:nth-child(2)[aria-current]").wait_for()
        assert await page.evaluate(marked) == 2
        await page.get_by_label("Find in this episode").fill("needle")
        await page.get_by_role("button", name="turn 3").click()
        assert await found.all_inner_texts() == ["turn 1", "turn 3"], "case is ignored"
        await page.get_by_label("Find in this episode").fill("nowhere")
        await page.get_by_text("not found").wait_for()
        assert await page.evaluate(marked) == 0


async def test_a_text_is_marked_after_characters_that_grow_in_lower_case(
    chromium: Any, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "\u0130\u0130 Find THIS"}]
    marked = "[...CSS.highlights.get('found')].map(range => range.toString())"
    path = written(tmp_path / "r.jsonl", result(messages=said))
    async with offline(path) as url, open_page(chromium, f"{url}#/episode/0") as page:
        field = page.get_by_label("Find in this episode")
        await field.fill("find this")
        await page.get_by_role("button", name="turn 1").wait_for()
        assert await page.evaluate(marked) == ["Find THIS"]
        await field.fill("\u0130 f")
        await page.get_by_role("button", name="turn 1").wait_for()
        assert await page.evaluate(marked) == ["\u0130 F"]


async def test_an_episode_is_copied_and_saved(chromium: Any, tmp_path: Path) -> None:
    one = result()
    async with (
        offline(written(tmp_path / "r.jsonl", one)) as url,
        open_page(chromium, f"{url}#/episode/0", permissions=["clipboard-read", "clipboard-write"]) as page,
    ):
        copied = "navigator.clipboard.readText()"
        await page.get_by_role("button", name="Copy text").click()
        await page.get_by_text("Copied.").wait_for()
        text = await page.evaluate(copied)
        assert text.startswith("# g/0: task fix-it, environment bash, reward 1\n\n## system\n\nYou mend")
        assert "## turn 1\n\nLet me look.\nbash\ncommand: git diff\n\n## tool\n\ndiff --git" in text
        await page.get_by_role("button", name="Copy JSON").click()
        await page.wait_for_function(f"{copied}.then((text) => text.startsWith('{{'))")
        assert Result.model_validate_json(await page.evaluate(copied)) == one
        async with page.expect_download() as started:
            await page.get_by_role("button", name="Save JSON").click()
        saved = await started.value
        assert saved.suggested_filename == "g-0.json"
        assert Result.model_validate_json((await saved.path()).read_text()) == one


async def test_a_printed_episode_has_its_folded_texts(chromium: Any, tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "You mend things."},
        {"role": "assistant", "content": "", "tool_calls": [call("bash", '{"command": "run"}', 1)]},
        {"role": "tool", "tool_call_id": "c1", "content": "\n".join(f"line {n}" for n in range(500))},
    ]
    path = written(tmp_path / "r.jsonl", result(messages=said))
    async with (
        offline(path) as url,
        open_page(chromium, f"{url}#/episode/0", color_scheme="dark") as page,
    ):
        await page.get_by_text("Show all 500 lines").wait_for()
        await page.emulate_media(media="print")
        await page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        await page.get_by_text("line 499").wait_for()
        assert await page.get_by_text("You mend things.").last.is_visible()
        background = "getComputedStyle(document.documentElement).backgroundColor"
        assert await page.evaluate(background) == "rgb(247, 248, 250)", "it is light"
        cut = "nodes => nodes.filter(n => n.scrollHeight > n.clientHeight + 1).length"
        assert await page.locator(".output").evaluate_all(cut) == 0


async def test_turns_fold_into_one_line(chromium: Any, tmp_path: Path) -> None:
    one, output = result(), "line 1\nline 2\n[exit status 1]\n"
    said = [*one.messages[:-1], {"role": "tool", "tool_call_id": "c2", "content": output}]
    path = written(tmp_path / "r.jsonl", result(messages=said), result("g/1"))
    async with offline(path) as url, open_page(chromium, f"{url}#/episode/0") as page:
        first, second = (page.get_by_role("region", name=f"Turn {n}") for n in (1, 2))
        await page.get_by_label("One line per turn").check()
        gist = second.get_by_role("button", expanded=False)
        assert await gist.inner_text() == "editor a.py\n→ [exit status 1]"
        assert not await second.get_by_text("line 2").is_visible()
        await gist.click()
        assert await second.get_by_text("line 2").is_visible()
        assert not await first.get_by_text("Let me look.").is_visible()
        await page.get_by_label("Find in this episode").fill("look")
        await page.keyboard.press("Enter")
        assert await first.get_by_text("Let me look.").is_visible()
        await page.goto(f"{url}#/episode/1")
        await page.get_by_text("sample 1", exact=False).first.wait_for()
        assert await first.get_by_role("button", expanded=False).is_visible(), (
            "the next episode is folded, too"
        )
        await (
            page.get_by_role("table", name="Time by step").get_by_role("button", name="turn 1, model").click()
        )
        assert await first.get_by_text("Let me look.").is_visible()
        await page.get_by_label("One line per turn").uncheck()
        assert await second.get_by_text("red").is_visible()


async def test_an_exported_file_has_the_search_and_saves_episodes(chromium: Any, tmp_path: Path) -> None:
    one, path = result(), tmp_path / "out.html"
    path.write_bytes(export_html([one.model_dump_json().encode()], "r"))
    async with open_page(chromium, path.as_uri()) as page:
        await page.evaluate("location.hash = '#/episode/0?inside=plain'")
        await page.get_by_role("search").get_by_role("button", name="turn 2").wait_for()
        async with page.expect_download() as started:
            await page.get_by_role("button", name="Save JSON").click()
        assert Result.model_validate_json((await (await started.value).path()).read_text()) == one
