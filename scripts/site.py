"""MkDocs hook (mkdocs.yml) that adds pages to the site: pages from outside docs/, pages generated from code,
and files that pages link to. The links in the sources do not change."""

import itertools
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

import prorl_envs
from prorl_envs.cli.main import cli
from prorl_envs.conformance.suite import THEMES

if TYPE_CHECKING:  # tests read this file without MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent

#: Paths of pages outside docs/, and their paths on the site.
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents-md.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "examples/README.md": "examples.md",
    "examples/trainers/README.md": "examples/trainers.md",
    "docs/decisions/README.md": "decisions/index.md",
    "tests/attacks/README.md": "attacks.md",
} | {
    f"envs/{path.parent.name}/README.md": f"environments/{path.parent.name}.md"
    for path in ROOT.glob("envs/*/README.md")
}

#: Generated pages: title, and packages whose public names are described, or modules that are described.
API_PAGES = {
    "client": ("The client", ("rollout.client", "runs", "loggers")),
    "types": ("Results and requests", ("rollout.api", "model")),
    "environment": ("Environments", ("env",)),
    "sandbox": ("Sandboxes and tools", ("sandbox", "tools", "images")),
    "errors": ("Errors", ("errors",)),
}
MODULES = {"trainers": ("Trainers", ("trainers.rows", "trainers.weights", "trainers.advantages"))}

#: Factors of the search ranking by the prefix of a page's path. Other pages have the factor 1. Instructions
#: rank before decisions and sources.
BOOSTS = {
    "index.md": 2.0,
    "tutorial.md": 2.0,
    "install.md": 2.0,
    "connect.md": 2.0,
    "evaluate.md": 2.0,
    "troubleshooting.md": 2.0,
    "glossary.md": 1.5,
    "decisions/": 0.001,  # the search multiplies matches in titles by 1,000
    "changelog.md": 0.1,
    "conformance.md": 0.3,
    "attacks.md": 0.3,
    "source/": 0.001,
}

#: A Markdown link or picture, or the source of an HTML picture.
LINK = re.compile(r"""(\]\(|\b(?:src|srcset)=")([^)"\s#:]+)(#[^)"\s]*)?([)"])""")
#: A badge. It is removed, because the browser would load it from another server.
BADGE = re.compile(r"^\[?!\[[^\]]*\]\(https://img\.shields\.io/.*\n", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".yaml": "yaml",
    ".json": "json",
    ".toml": "toml",
}


def public_names(packages: tuple[str, ...]) -> list[str]:
    """Return the public names of the packages."""
    prefixes = tuple(f"prorl_envs.{package}" for package in packages)
    return [name for name in prorl_envs.__all__ if prorl_envs.MODULES[name].startswith(prefixes)]


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages from outside docs/, the generated pages and the linked files."""
    from mkdocs.structure.files import File

    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    pages: dict[str, tuple[str, Sequence[str]]] = {
        **{name: (title, public_names(packages)) for name, (title, packages) in API_PAGES.items()},
        **MODULES,
    }
    for name, (title, names) in pages.items():
        text = f"# {title}\n\n" + "".join(f"::: prorl_envs.{each}\n\n" for each in names)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    for path in sorted(linked()):
        text = (
            f"# `{path}`\n\n````{LANGUAGES.get(Path(path).suffix, '')}\n{(ROOT / path).read_text()}\n````\n"
        )
        files.append(File.generated(config, source_uri(path), content=text))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Change links into links to pages of the site, and set the page's factor of the search ranking."""
    page_uri = page.file.src_uri
    page.meta.setdefault("search", {})["boost"] = boost(page_uri)
    path = next((path for path, uri in PAGES.items() if uri == page_uri), f"docs/{page_uri}")

    def site_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        uri = uri_of(target)
        if uri is None:
            return match[0]
        relative = posixpath.relpath(uri, posixpath.dirname(page_uri) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    if page_uri == "conformance.md":
        markdown += promises()
    return outside_fences(markdown, lambda text: LINK.sub(site_link, BADGE.sub("", text)))


def boost(uri: str) -> float:
    """Return the factor of a page in the search ranking."""
    return next((factor for start, factor in BOOSTS.items() if uri.startswith(start)), 1.0)


def outside_fences(text: str, change: Any) -> str:
    """Apply `change` to the parts of a text between code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def uri_of(target: str) -> str | None:
    """Return the site path of a repository file or of a folder with a README; None if it is missing."""
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    if target in PAGES:
        return PAGES[target]
    if not (ROOT / target).is_file():
        return None
    return target.removeprefix("docs/") if target.startswith("docs/") else source_uri(target)


def source_uri(path: str) -> str:
    return f"source/{path}.md"


def linked() -> Iterator[str]:
    """Return the linked files that are not pages."""
    found = set()
    for page in [*PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]:
        for link in LINK.finditer(FENCE.sub("", (ROOT / page).read_text())):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
            if (ROOT / target).is_file() and uri_of(target) == source_uri(target):
                found.add(target)
    yield from found


def commands() -> str:
    """Generate the page of the commands from their declarations."""
    lines = [
        "# Commands",
        "",
        "Each command has `--help`. Exit status 0: success; 1: failure; 2: wrong input.",
        "",
    ]
    for path, command in walk("prorl-envs", typer.main.get_command(cli)):
        if isinstance(command, TyperGroup):
            continue
        lines += [f"## {path}", "", str(command.help or "").split("\f")[0], ""]
        rows = [row for parameter in command.params if (row := described(parameter))]
        if rows:
            lines += ["| | default | |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def promises() -> str:
    """Generate the tables of the promises, one for each theme."""
    lines: list[str] = []
    for theme, parts in itertools.groupby(THEMES, lambda part: part.theme):
        lines += [
            "",
            f"## {theme.capitalize()}",
            "",
            "| id | promise | needs | not made by |",
            "|---|---|---|---|",
        ]
        for promise in itertools.chain.from_iterable(parts):
            needs, exempt = ", ".join(promise.needs), ", ".join(promise.exempt)
            lines.append(f"| {promise.id} | {promise.text} | {needs} | {exempt} |")
    return "\n".join(lines) + "\n"


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each command and its full name."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {name}", inner)


def described(parameter: Any) -> str:
    """Return a row of a command's table; an empty text for hidden parameters."""
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return ""
    names = (
        ", ".join(f"`{name}`" for name in parameter.opts if name.startswith("-"))
        or f"`{parameter.name.upper()}`"
    )
    default = parameter.default
    shown = (
        ""
        if default is None or default is False or callable(default) or "Sentinel" in repr(default)
        else f"`{default}`"
    )
    text = " ".join(str(getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    return f"| {names} | {shown} | {text} |"
