"""Take the screenshots in docs/images: the demo's dashboard, then the viewer with the demo's results.

    .venv/bin/python scripts/screenshots.py [FOLDER]

The script needs Chromium (`apt-get install chromium`) and the test extra.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
PROGRAM = Path(sys.executable).with_name("prorl-envs")
SIZE = {"width": 1400, "height": 860}
#: Number of finished jobs when the screenshot of the dashboard is taken; other jobs still run.
ENOUGH = 60
MAX_BYTES = 300_000


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        run = Path(folder) / "demo"
        take_dashboard(browser, run, target)
        take_viewer(browser, run, target)
    for path in sorted(target.glob("*.png")):
        size = path.stat().st_size
        sys.stdout.write(f"{path}: {size / 1000:.0f} kB\n")
        if size > MAX_BYTES:
            sys.exit(f"{path} is larger than {MAX_BYTES / 1000:.0f} kB")


@contextmanager
def browsing() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    flags = ["--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


def take_dashboard(browser: Browser, run: Path, target: Path) -> None:
    """Run the demo, and take a screenshot of its dashboard when enough jobs have finished.

    Args:
        run: folder for the demo's results.
        target: folder for the screenshot.
    """
    command = [PROGRAM, "demo", "--out", run]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        url = next(found[1] for line in demo.stderr if (found := re.search(r"rollout service: (\S+)", line)))
        done = subprocess.run(
            [PROGRAM, "dashboard", "--service", url], capture_output=True, text=True, check=True
        )
        page = open_page(browser, done.stdout.strip())
        for line in demo.stderr:
            if (found := re.match(r"(\d+)/\d+ done", line)) and int(found[1]) >= ENOUGH:
                time.sleep(1.5)  # the service updates the page every second
                page.screenshot(path=target / "dashboard.png")
                break
        for _ in demo.stderr:
            pass
    page.context.close()
    if demo.returncode:
        sys.exit(f"the demo failed with exit status {demo.returncode}")


def take_viewer(browser: Browser, run: Path, target: Path) -> None:
    """Take screenshots of the run's overview, and of an episode that solved a SWE-bench task."""
    command = [PROGRAM, "view", run, "--tokenizer", "scripted"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            link = viewer.stdout.readline().strip()
            page = open_page(browser, link)
            page.get_by_role("heading", name="Environments").wait_for()
            page.screenshot(path=target / "viewer-run.png")
            page.goto(f"{link}#/episode/{solved(link)}?env=swebench")
            page.get_by_role("region", name="Turn 1").wait_for()
            page.screenshot(path=target / "viewer-rollout.png")
        finally:
            viewer.terminate()


def solved(link: str) -> int:
    """Return the number of the shortest SWE-bench episode with reward 1."""
    with urllib.request.urlopen(f"{link}api/episodes") as answer:
        body: dict[str, Any] = json.load(answer)
    entries = [dict(zip(body["names"], values, strict=True)) for values in body["entries"]]
    found = [i for i, row in enumerate(entries) if row["environment"] == "swebench" and row["reward"] == 1]
    return min(found, key=lambda i: entries[i]["tokens"])


def open_page(browser: Browser, url: str) -> Page:
    context = browser.new_context(viewport=SIZE, color_scheme="light", reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    return page


if __name__ == "__main__":
    main()
