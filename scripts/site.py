"""What the documentation's site has beyond docs/: pages that lie elsewhere in the repository, pages made of
code, and the files that pages link to. A hook of MkDocs (mkdocs.yml); the sources' links stay as they are.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperGroup

from prorl_envs.cli.main import cli

ROOT = Path(__file__).parent.parent

#: Pages outside docs/, by where they lie, and what they are on the site.
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
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

#: Pages made of the docstrings of modules.
MODULES = {
    "client": ("The client", ["prorl_envs.rollout.client", "prorl_envs.rollout.sync_client"]),
    "types": (
        "Results and requests",
        ["prorl_envs.rollout.types", "prorl_envs.rollout.batch_types", "prorl_envs.policy.types"],
    ),
    "environment": (
        "Environments",
        ["prorl_envs.env.base", "prorl_envs.env.sandboxed", "prorl_envs.env.scoring"],
    ),
    "sandbox": (
        "Sandboxes and tools",
        ["prorl_envs.sandbox.base", "prorl_envs.tools.client", "prorl_envs.tools.types"],
    ),
    "trainers": (
        "Trainers",
        ["prorl_envs.trainers.rows", "prorl_envs.trainers.weights", "prorl_envs.trainers.advantages"],
    ),
}

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".yaml": "yaml",
    ".json": "json",
    ".toml": "toml",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/, and what is made of code."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    for name, (title, modules) in MODULES.items():
        text = f"# {title}\n\n" + "".join(f"::: {module}\n\n" for module in modules)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    for path in sorted(linked()):
        text = (
            f"# `{path}`\n\n````{LANGUAGES.get(Path(path).suffix, '')}\n{(ROOT / path).read_text()}\n````\n"
        )
        files.append(File.generated(config, source_uri(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to pages of the site."""
    here = page.file.src_uri
    path = next((path for path, uri in PAGES.items() if uri == here), f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        uri = uri_of(target)
        if uri is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(uri, posixpath.dirname(here) or '.')}{match[3] or ''}{match[4]}"

    return outside_fences(markdown, lambda text: LINK.sub(moved, text))


def outside_fences(text: str, change: Any) -> str:
    """`text` with `change` made to what is not a block of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def uri_of(target: str) -> str | None:
    """Where a file of the repository, or a folder with a README, is on the site; None where it is not."""
    if (ROOT / target).is_dir():
        target = f"{target}/README.md"
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/") and target.endswith(".md"):
        return target.removeprefix("docs/")
    return source_uri(target) if (ROOT / target).is_file() else None


def source_uri(path: str) -> str:
    return f"source/{path}.md"


def linked() -> Iterator[str]:
    """The files, no pages, to which pages link."""
    found = set()
    for page in [*PAGES, *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]:
        for link in LINK.finditer(FENCE.sub("", (ROOT / page).read_text())):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
            if (ROOT / target).is_file() and uri_of(target) == source_uri(target):
                found.add(target)
    yield from found


def commands() -> str:
    """The command line, from its own declarations."""
    lines = [
        "# Commands",
        "",
        "Each has `--help`. Exit status 0: done; 1: it did not come out well; 2: wrong input.",
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


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Each command with its words."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(f"{path} {name}", inner)


def described(parameter: Any) -> str:
    """A row of a command's table."""
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
