"""Agreement of the documentation with the project: all named things exist."""

import re
import runpy
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from typer.core import TyperGroup

from prorl_envs.cli.main import cli
from prorl_envs.cli.output.settings_table import settings_schema
from prorl_envs.config import (
    AgentSettings,
    EnvironmentSettings,
    HarnessSettings,
    NemoSettings,
    Settings,
    ToolSettings,
)

ROOT = Path(__file__).parent.parent

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A typed command: in a shell block, or between backticks.
COMMAND = re.compile(r"(?<![\w/-])(?:\.venv/bin/)?prorl-envs((?: +[^\s`'#|;&()]+)+)")
TARGET = re.compile(r"(?<![\w-])(?<!cannot )make ([a-z][a-z0-9-]*)")
COMMENT = re.compile(r"(?:^| )# .*$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) ?\| .+ \|$", re.MULTILINE)


def pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name and (ROOT / name).exists()]


PAGES = pages()


def code_of(text: str) -> Iterator[str]:
    """Yield text that may contain commands: fenced blocks without comments, and inline code."""
    yield from (COMMENT.sub("", body) for _, body in FENCE.findall(text))
    yield from (line[4:] for line in text.splitlines() if line.startswith("    "))
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, no punctuation, hyphens for spaces."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_pages() -> None:
    assert ROOT / "README.md" in PAGES and ROOT / "docs" / "settings.md" in PAGES


def problem_of(link: str, page: Path) -> str:
    """Return the problem of a link on a page; "" if there is none."""
    if re.match(r"[a-z]+:", link):
        return ""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return "leads nowhere"
    if not target.resolve().is_relative_to(ROOT):
        return "leads out of the project"
    return "has no such heading" if anchor and anchor not in anchors(target.read_text()) else ""


def test_relative_links_have_a_target() -> None:
    problems = [
        f"{page.relative_to(ROOT)}: {link} {problem}"
        for page in PAGES
        for link in LINK.findall(FENCE.sub("", page.read_text()))
        if (problem := problem_of(link, page))
    ]
    assert not problems
    assert problem_of("none.md", ROOT / "README.md") and problem_of("#none", ROOT / "README.md")


def test_the_list_of_decisions_is_complete() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = dict(re.findall(r"^\| \[(.*)\]\((.*)\) \|", (folder / "README.md").read_text(), re.MULTILINE))
    found = {
        HEADING.findall(page.read_text())[0]: page.name
        for page in folder.glob("*.md")
        if page.name != "README.md"
    }
    assert listed == found


@cache
def program() -> Any:
    """Command line built by Typer, shared because the construction is slow."""
    return typer.main.get_command(cli)


def check_command(words: list[str]) -> None:
    """Fail if the command line does not know a command or option."""
    command = program()
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"prorl-envs has no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{command.name} has no option {word}"


def test_commands_exist() -> None:
    for page in PAGES:
        for code in code_of(page.read_text()):
            for rest in COMMAND.findall(code.replace("\\\n", " ")):
                try:
                    check_command(rest.split())
                except AssertionError as error:
                    pytest.fail(f"{page.relative_to(ROOT)}: {error}")


def test_tables_have_a_head() -> None:
    """An empty line ends a table; rows below it would be shown as text."""
    for page in PAGES:
        lines = ["", *page.read_text().splitlines(), ""]
        for above, line, below in zip(lines, lines[1:], lines[2:], strict=False):
            starts = line.startswith("|") and not above.startswith("|")
            assert not starts or re.match(r"\|[-| :]+\|$", below), f"{page.relative_to(ROOT)}: {line}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_make_targets_exist() -> None:
    for page in PAGES:
        for code in code_of(page.read_text()):
            assert set(TARGET.findall(code)) <= make_targets(), f"{page.relative_to(ROOT)}: {code}"


def test_every_make_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None and set(phony[1].split()) == make_targets()


def test_the_checks_themselves_detect_errors() -> None:
    with pytest.raises(AssertionError, match="no command 'rnu'"):
        check_command(["rnu", "bash"])
    with pytest.raises(AssertionError, match="no option --sample"):
        check_command(["run", "bash", "--sample", "3"])
    assert COMMAND.findall("x && .venv/bin/prorl-envs nemo rows a b  # c") == [" nemo rows a b"]
    assert not COMMAND.findall("pip install './prorl-envs[nemo]'")


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Return every setting with its default, sections joined by a dot."""
    for name, field in model.model_fields.items():
        if name == "environments":  # a mapping whose entries are described once
            yield from settings(EnvironmentSettings, f"{prefix}{name}.name.")
        elif name == "agents" and not prefix:
            yield from settings(AgentSettings, f"{name}.name.")
        elif name == "tools":
            yield from settings(ToolSettings, f"{prefix}{name}.name.")
        elif name == "harness":
            yield from settings(HarnessSettings, f"{prefix}{name}.")
        elif name == "nemo":
            yield from settings(NemoSettings, f"{prefix}{name}.")
        if isinstance(field.default, BaseModel):
            yield from settings(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, field.get_default(call_default_factory=True)


def test_the_tables_of_settings_are_up_to_date() -> None:
    updated_page = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))["updated_page"]
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert updated_page(page) == page, "run scripts/settings_page.py"
    assert updated_page(page.replace("| 8600 |", "| 1 |").replace("TCP port", "port")) == page
    assert "`server.gone`" not in updated_page(page + "\n| `server.gone` | | x |\n")


def test_the_schema_of_a_settings_file_describes_every_setting() -> None:
    schema = settings_schema()
    server = schema["$defs"]["ServerSettings"]
    assert server["properties"]["port"]["description"] == "TCP port; 0 uses a free one"
    assert server["properties"]["port"]["maximum"] == 65_535 and not server["additionalProperties"]
    for section in (schema, *schema["$defs"].values()):
        for name, one in section.get("properties", {}).items():
            assert one.get("description") or one.get("$ref"), (section["title"], name)


def test_every_setting_is_described_with_its_default() -> None:
    described = ROW.findall((ROOT / "docs" / "settings.md").read_text())
    known = dict(settings(Settings))
    assert sorted(name for name, _ in described) == sorted(known)
    for name, cell in described:
        default = str(known[name]) if isinstance(known[name], Path) else known[name]
        shown = yaml.safe_load(cell) if cell else None
        assert (shown or None) == ((list(default) if isinstance(default, tuple) else default) or None), name
