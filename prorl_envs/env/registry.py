"""Registry of environment families by name: the built-in ones, and those of other packages.

A third-party package registers a family under the entry-point group `prorl_envs.environments`:

    [project.entry-points."prorl_envs.environments"]
    chess = "my_package.chess:ChessEnvironment"
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from prorl_envs.env.base import Environment, Task
from prorl_envs.env.rows import read_tasks
from prorl_envs.errors import InputError, NoExampleData, name_hint

GROUP = "prorl_envs.environments"

_BUILT_IN = {
    "bash": "prorl_envs.envs.bash.env:BashEnvironment",
    "code": "prorl_envs.envs.code.env:CodeEnvironment",
    "ipython": "prorl_envs.envs.ipython.env:IPythonEnvironment",
    "math": "prorl_envs.envs.math.env:MathEnvironment",
    "stem": "prorl_envs.envs.stem.env:StemEnvironment",
    "swebench": "prorl_envs.envs.swebench.env:SwebenchEnvironment",
    "terminal": "prorl_envs.envs.terminal.env:TerminalEnvironment",
}

type Family = type[Environment[Any]]


class Families(Mapping[str, Family]):
    """Families by name. A family is imported on access, so listing the names imports nothing."""

    def __init__(self, targets: Mapping[str, EntryPoint]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Family:
        target = self._targets[name]
        try:
            family = target.load()
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"environment {name!r} cannot be imported from {target.value}: {error}",
                hint="install the dependencies of its package",
            ) from error
        if not (inspect.isclass(family) and issubclass(family, Environment)):
            raise InputError(f"environment {name!r}: {target.value} is not a subclass of Environment")
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


@cache
def environments() -> Mapping[str, Family]:
    """Return every family known on this machine. Another package cannot take a built-in name."""
    built_in = {name: EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    third_party = {point.name: point for point in entry_points(group=GROUP)}
    return Families(third_party | built_in)


def family(name: str) -> Family:
    """Return the family called `name`.

    Raises:
        InputError: there is no such family, or it cannot be imported.
    """
    return known(environments(), name)


def is_built_in(name: str) -> bool:
    """Return true if the family called `name` is part of this package."""
    return name in _BUILT_IN


def description_of(family: Family) -> str:
    """Return the first line of the family's docstring, its description."""
    return (inspect.getdoc(family) or "").partition("\n")[0]


def known(offered: Mapping[str, Family], name: str) -> Family:
    """Return one of the offered environments.

    Args:
        offered: environments by name.
        name: the requested name.

    Raises:
        InputError: `name` is not offered; the hint names the closest names, or all.
    """
    if name in offered:
        return offered[name]
    raise InputError(f"no environment is called {name!r}", hint=name_hint(name, offered))


def load_tasks(name: str, path: Path | str) -> list[Task]:
    """Read a JSONL data file of the family `name`.

    Raises:
        InputError: `file:line: field: problem`.
    """
    return read_tasks(family(name).load, Path(path))


def example_path(name: str) -> Path:
    """Return the path of the family's own example data, beside the module of its class: `data/example.jsonl`,
    or the folder `data/tasks` of task directories.

    Raises:
        InputError: no such family, or it ships no example data.
    """
    return examples_of(name, family(name))


def examples_of(name: str, chosen: Family) -> Path:
    """Return the path of the example data of the class `chosen`; the error message shows `name`.

    Raises:
        NoExampleData: the class ships no example data.
    """
    module = importlib.import_module(chosen.__module__)
    data = Path(inspect.getfile(module)).parent / "data"
    for path in (data / "example.jsonl", data / "tasks"):
        if path.exists():
            return path
    raise NoExampleData(f"environment {name!r} ships no example data", hint="give a data file")
