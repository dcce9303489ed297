"""The page of an episode in a real browser: reasons of a reward, search, copies, print."""

from pathlib import Path
from typing import Any

import pytest

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
