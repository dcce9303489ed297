"""Code blocks of the documentation, and the comments that exclude blocks from the tests.

A comment in the line above a block excludes it, or its lines that match a pattern, from the tests:

    <!-- not run here: needs Slurm -->
    <!-- not run here: /pip install/ takes packages from elsewhere -->

Excluded lines are still parsed with the parser of their language.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- not run here: (?:/(?P<only>.+?)/ )?(?P<why>.+?) -->\n)?"
    r"^```(?P<language>[\w-]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        page: below the repository; `line`: of its first line.
        language: as the fence names it.
        body: its content.
        why: why it, or a part of it, is not run; "" if all of it is.
        only: pattern of the lines that are not run; "" for all.
    """

    page: str
    line: int
    language: str
    body: str
    why: str
    only: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether at least one line is run."""
        return not self.why or bool(self.only)

    def left_out(self, line: str) -> bool:
        """Whether at least one line is not run."""
        return bool(self.only) and re.search(self.only, line) is not None


def pages() -> list[str]:
    """Return every page of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in sorted(set(listed.stdout.split("\0"))) if name and (ROOT / name).exists()]


def _blocks() -> Iterator[Block]:
    for page in pages():
        text = (ROOT / page).read_text()
        for found in _BLOCK.finditer(text):
            line = text[: found.start("body")].count("\n") + 1
            parts = (found["language"], found["body"], found["why"] or "", found["only"] or "")
            yield Block(page, line, *parts)


BLOCKS = tuple(_blocks())


def parametrize(*languages: str, runs: bool | None = None) -> pytest.MarkDecorator:
    """Parametrize a test with the blocks in the given languages."""
    chosen = [
        block for block in BLOCKS if block.language in languages and (runs is None or block.runs is runs)
    ]
    return pytest.mark.parametrize("block", chosen, ids=lambda block: block.id)


def commands(body: str) -> list[str]:
    """Return the commands of a shell block, each in one line, without comments."""
    lines = re.sub(r"\\\n\s*", "", body).splitlines()
    return [line for line in (re.sub(r"(?:^|\s)# .*$", "", line).strip() for line in lines) if line]
