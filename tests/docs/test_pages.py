"""Agreement of pages with the source: quoted messages, named files, docstrings, pictures, the site."""

import ast
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from prorl_envs.conformance.suite import PROMISES
from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.types import Stage
from prorl_envs.sandbox.drivers.select import DRIVERS
from tests.docs.blocks import BLOCKS, ROOT, pages

#: A message quoted by troubleshooting.md: the whole text of a heading, with … for variable parts.
MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)
#: A file between backticks, and whether the text marks it as removed.
NAMED_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|sh|yaml|toml|md|js|css|html))`(, since removed)?")
#: An image in HTML, as in the README.
IMAGE = re.compile(r'<(?:img|source)\b[^>]*?\bsrc(?:set)?="([^"]+)"')
MAX_PICTURE_BYTES = 500_000
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of the package."""
    return {path: ast.parse(path.read_text()) for path in (ROOT / "prorl_envs").rglob("*.py")}


@cache
def literals() -> str:
    """Return the strings of the package and its set-up script, separated by \\1. NUL stands for a value."""
    found = {(ROOT / "scripts" / "setup.sh").read_text()}
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.add("".join(map(str, parts)))
    return "\1".join(found)


def is_in_source(message: str) -> bool:
    """Whether one string of the source has the fixed parts of a message, in order."""
    pattern = "[^\1]*?".join(re.escape(part) for part in message.split("…"))
    return re.search(pattern, literals()) is not None


def test_quoted_messages_are_in_the_source() -> None:
    quoted = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(quoted) > 30
    assert [message for message in quoted if not is_in_source(message)] == []
    assert not is_in_source("no driver works on that machine: …")


#: Folders that file names in decisions are relative to.
BELOW = (".", "prorl_envs", "prorl_envs/envs/swebench", "docs")
#: Test modules in texts that no other test reads.
NAMED_TEST = re.compile(r"(?<![./])\b(?:tests|envs/\w+/tests)/[\w/]+\.py\b")


def problem_of(name: str, removed: str) -> str:
    """Return the problem of a file name on a page; "" if there is none."""
    exists = any((ROOT / below / name).exists() for below in BELOW)
    if exists and removed:
        return f"{name} exists"
    return "" if exists or removed else f"{name} does not exist: mark it `{name}`, since removed"


def test_files_named_by_decisions_exist_or_are_marked() -> None:
    problems = [
        f"{page.name}: {problem}"
        for page in (ROOT / "docs" / "decisions").glob("*.md")
        for name, removed in NAMED_FILE.findall(FENCE.sub("", page.read_text()))
        if (problem := problem_of(name, removed))
    ]
    assert problems == []
    assert problem_of("sandbox/none.py", "") and not problem_of("sandbox/none.py", ", since removed")
    assert problem_of("sandbox/base.py", ", since removed") and not problem_of("sandbox/base.py", "")


def test_named_test_modules_exist() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [ROOT / "pyproject.toml", ROOT / "Makefile", *(ROOT / "scripts").glob("*.sh")]
    found = {(path.name, name) for path in files for name in NAMED_TEST.findall(path.read_text())}
    assert len(found) > 20
    assert [found for found in sorted(found) if not (ROOT / found[1]).exists()] == []


def code_paragraphs(docstring: str) -> Iterator[str]:
    """Yield paragraphs of a docstring that are Python but that Markdown would show as prose."""
    for paragraph in re.split(r"\n\s*\n", FENCE.sub("", inspect.cleandoc(docstring))):
        try:
            statements = ast.parse(paragraph).body
        except SyntaxError:
            continue
        if any(not isinstance(statement, ast.Expr) for statement in statements):
            yield paragraph


def test_code_in_docstrings_is_fenced() -> None:
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                code = list(code_paragraphs(ast.get_docstring(node) or ""))
                found += [f"{path.relative_to(ROOT)}: {paragraph}" for paragraph in code]
    assert found == []
    assert list(code_paragraphs("Text.\n\nwith a as b:\n    pass")) == ["with a as b:\n    pass"]


def project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_badges_agree_with_the_package() -> None:
    badges = re.findall(
        r"^\[?!\[(.+?)\]\(https://img\.shields\.io/", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    classifiers = " ".join(project()["classifiers"])
    oldest = project()["requires-python"].removeprefix(">=")
    assert badges == [f"Python {oldest} or later", "Linux", f"License: {project()['license']}"]
    assert "POSIX :: Linux" in classifiers


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    [paper] = citation["references"]
    entries = "".join(block.body for block in BLOCKS if block.language == "bibtex")
    assert citation["version"] == project()["version"] and f"{{{citation['version']}}}" in entries
    assert citation["title"] in entries and paper["title"] in entries
    names = " and ".join(f"{one['family-names']}, {one['given-names']}" for one in paper["authors"])
    assert names in re.sub(r"\s+", " ", entries)
    assert paper["url"].rpartition("/")[2] in entries


def test_the_layout_for_agents_exists() -> None:
    table = (ROOT / "AGENTS.md").read_text().partition("## Layout")[2].partition("## ")[0]
    paths = re.findall(r"`([\w./]+/)`", table)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).is_dir()] == []


def test_pictures_exist() -> None:
    for page in pages():
        for source in IMAGE.findall(FENCE.sub("", (ROOT / page).read_text())):
            picture = (ROOT / page).parent / source
            assert picture.is_file() and picture.stat().st_size < MAX_PICTURE_BYTES, f"{page}: {source}"


def test_the_glossary_names_every_stage_failure_kind_and_driver() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = dict(re.findall(r"^\| (\*\*.+?) \| (.+) \|$", text, re.MULTILINE))
    assert ("auto", *re.findall(r"`([\w-]+)`", rows["**driver**"])) == DRIVERS
    kinds = rows["**failure**"].rpartition(":")[2].strip(" .").split(", ")
    assert kinds == [kind.value for kind in FailureKind]
    assert {f"**{stage.value.upper()}**" for stage in Stage} <= set(rows)


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_user_page_is_in_the_navigation(site: ModuleType) -> None:
    nav = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    listed = set(re.findall(r"[\w./-]+\.md", nav))
    expected = {
        site.uri_of(page)
        for page in pages()
        if page.startswith("docs/") and not page.startswith("docs/decisions/")
    }
    assert expected <= listed


def test_search_ranks_user_pages_before_decisions_and_sources(site: ModuleType) -> None:
    first, last = ("index.md", "connect.md", "troubleshooting.md"), ("decisions/sandboxes.md", "source/x.md")
    assert min(map(site.boost, first)) > site.boost("settings.md") > max(map(site.boost, last))


def test_the_site_lists_every_promise(site: ModuleType) -> None:
    tables = site.promises()
    for promise in PROMISES:
        assert f"| {promise.id} | {promise.text} | " in tables
    assert tables.count("## File systems") == 1


def test_links_of_pages_become_links_of_the_site(site: ModuleType) -> None:
    assert site.uri_of("docs/decisions") == "decisions/index.md"
    assert site.uri_of("docs/learning/held_out.svg") == "learning/held_out.svg"
    assert site.uri_of("Makefile") == "source/Makefile.md"
    assert site.LINK.sub(r"\g<1>X\g<4>", '<img src="docs/a.png"> [b](c.md)') == '<img src="X"> [b](X)'
