"""Docstrings and comments of the package are plain technical English, as far as words can be counted.

The limits are the values of comparable projects (verifiers, the MCP SDK, httpcore, inspect's sandbox tools),
in hits per 1,000 words.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import prorl_envs
from prorl_envs.cli.main import cli
from prorl_envs.conformance.suite import PROMISES

ROOT = Path(prorl_envs.__file__).resolve().parent.parent
VERBS = (
    "is|are|was|were|it|they|has|have|had|does|do|did|can|may|must|should|would|will|comes|came|goes|[a-z]+s"
)
#: Patterns, and the largest number of hits per 1,000 words.
LIMITS = {
    "what as a noun": (rf"\b[Ww]hat (?:{VERBS})\b", 0.8),
    "where for if": (r"\b[Ww]here (?:it|there|that|they|this|none|one|no)\b", 0.1),
    "told, hears": (r"\b(?:told|tells?|hears?|heard|heeds?|heeded)\b", 0.3),
    "nobody": (r"\b(?:[Nn]obody|[Ss]omebody|[Aa]nybody|[Ww]hoever)\b", 0.1),
}
#: Folders in which only the first word of docstrings is checked.
UNCOUNTED = ("tests", "bench", "scripts", "faults", "fuzz", "learn")
FIRST_WORD = re.compile(r"(?:What|Who|Those|Whoever|Whatever)\b")


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    own = [path for path in (ROOT / "prorl_envs").rglob("*.py") if "envs" not in path.parts[-3:]]
    families = [path for path in (ROOT / "envs").rglob("*.py") if "tests" not in path.parts]
    return {path: path.read_text() for path in [*own, *families]}


def test_no_docstring_starts_with_a_relative_pronoun(sources: dict[Path, str]) -> None:
    others = [path for folder in UNCOUNTED for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {docstring[:60]}"
        for path, text in (sources | {path: path.read_text() for path in others}).items()
        for docstring in docstrings(text)
        if FIRST_WORD.match(docstring)
    ]
    assert found == []
    assert FIRST_WORD.match("What is left.") and not FIRST_WORD.match("Whole files.")


@pytest.fixture(scope="module")
def prose(sources: dict[Path, str]) -> list[str]:
    return [words for text in sources.values() for words in (*docstrings(text), *comments(text))]


@pytest.mark.parametrize("name", LIMITS)
def test_words_are_rare(prose: list[str], name: str) -> None:
    pattern, limit = LIMITS[name]
    total = sum(len(words.split()) for words in prose)
    hits = [found for words in prose for found in re.findall(pattern, words)]
    assert total > 50_000
    assert 1000 * len(hits) / total <= limit, hits[:20]


def help_texts(command: Any) -> Iterator[str]:
    yield command.help or ""
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)
    for inner in getattr(command, "commands", {}).values():
        yield from help_texts(inner)


@pytest.mark.parametrize("name", LIMITS)
def test_help_and_promises_use_plain_words(name: str) -> None:
    texts = [*help_texts(typer.main.get_command(cli)), *(promise.text for promise in PROMISES)]
    assert len(texts) > 400
    pattern, _ = LIMITS[name]
    assert [text for text in texts if re.search(pattern, text)] == []
