"""Results for the viewer, and a real Chromium."""

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.rollout.api.types import Result

#: Two white pixels.
PICTURE = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAIAAAB7QOjdAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)
DIFF = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
EDIT = '{"path": "a.py", "old_str": "x = 1\\ny", "new_str": "x = 2\\ny"}'


def call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(job: str = "g/0", **changes: Any) -> Result:
    """Return the result of an episode of two turns, with these fields replaced."""
    group, _, sample = job.rpartition("/")
    turn = {
        "finish_reason": "stop",
        "weight_version": "7",
        "server": "http://127.0.0.1:1",
        "model_s": 0.5,
        "tools_s": 0.25,
    }
    ids = list(range(72, 84))
    fields: dict[str, Any] = {
        "cursor": 1,
        "job_id": job,
        "group_id": group,
        "sample": int(sample),
        "environment": "bash",
        "task_id": "fix-it",
        "state": "done",
        "reward": 1.0,
        "mask_sample": False,
        "stop_reason": "finished",
        "failure": None,
        "timings": {
            "queued_s": 0.1,
            "init_s": 0.2,
            "run_s": 1.6,
            "eval_s": 0.3,
            "model_s": 1.0,
            "tools_s": 0.5,
        },
        "trajectory": {
            "ids": ids,
            "loss_mask": [0] * 4 + [1] * 3 + [0] * 2 + [1] * 3,
            "logprobs": [0.0] * 4 + [-0.01, -1.0, -4.0] + [0.0] * 2 + [-0.5, -0.2, -0.1],
            "turns": [{**turn, "start": 4, "end": 7}, {**turn, "start": 9, "end": 12}],
        },
        "components": {"tests": 1.0},
        "evidence": {"checks": [{"name": "tests", "passed": True, "log": "ok"}], "scoring": "all"},
        "messages": [
            {"role": "system", "content": "You mend things."},
            {"role": "user", "content": "Mend a.py."},
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [call("bash", '{"command": "git diff"}', 1)],
            },
            {"role": "tool", "tool_call_id": "c1", "content": DIFF},
            {"role": "assistant", "content": "", "tool_calls": [call("editor", EDIT, 2)]},
            {"role": "tool", "tool_call_id": "c2", "content": "\x1b[31mred\x1b[0m plain"},
        ],
    }
    return Result.model_validate(fields | changes)


def written(path: Path, *results: Result) -> Path:
    path.write_text("".join(one.model_dump_json() + "\n" for one in results))
    return path


@pytest.fixture(scope="module")
async def chromium() -> AsyncIterator[Any]:
    """Browser for all tests of a module; each test opens its own context."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    # Chromium's own sandbox refuses root.
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=flags)
        yield browser
        await browser.close()
