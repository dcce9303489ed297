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
