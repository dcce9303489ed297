"""The public API is one list; documents and examples import only its names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import prorl_envs

ROOT = Path(prorl_envs.__file__).resolve().parent.parent
#: Integrations with NeMo Gym, gymnasium and trainers have modules of their own.
INTEGRATION = re.compile(r"prorl_envs\.(gym|nemo\.(server|fixture|rows)|trainers(\.\w+)?)")
IMPORT = re.compile(r"^\s*from (prorl_envs[\w.]*) import|^\s*import (prorl_envs[\w.]*)", re.MULTILINE)
#: Documents, examples and templates of new environments.
READ = ("README.md", "docs/*.md", "examples/**/*.py", "envs/*/README.md", "prorl_envs/cli/scaffold/**/*.txt")


def texts() -> Iterator[Path]:
    for pattern in READ:
        found = sorted(ROOT.glob(pattern))
        assert found, pattern
        yield from found


@pytest.mark.parametrize("path", list(texts()), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_public_names_are_imported(path: Path) -> None:
    modules = {first or second for first, second in IMPORT.findall(path.read_text())}
    assert {name for name in modules if name != "prorl_envs" and not INTEGRATION.fullmatch(name)} == set()


def test_each_public_name_can_be_imported_and_has_a_docstring() -> None:
    for name in prorl_envs.__all__:
        value = getattr(prorl_envs, name)
        assert value.__doc__ or not callable(value), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = prorl_envs.nothing


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(prorl_envs.__file__).read_text())
    seen = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == prorl_envs.MODULES
    assert sorted(prorl_envs.__all__) == sorted(seen)


def test_importing_the_package_imports_none_of_it() -> None:
    program = (
        "import sys, prorl_envs; print(*(name for name in sys.modules if name.startswith('prorl_envs.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
