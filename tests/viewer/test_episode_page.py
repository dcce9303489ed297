"""The page of an episode in a real browser: reasons of a reward, search, copies, print."""

from pathlib import Path
from typing import Any

import pytest

from tests.viewer.conftest import result, written
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
