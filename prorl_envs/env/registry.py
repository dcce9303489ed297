"""The environment families by name: the built-in ones, and those that other packages bring.

A third-party package registers a family under the entry-point group `prorl_envs.environments`:

    [project.entry-points."prorl_envs.environments"]
    chess = "my_package.chess:ChessEnvironment"
"""

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from prorl_envs.env.base import Environment, Task
from prorl_envs.env.rows import read_tasks
from prorl_envs.errors import InputError

GROUP = "prorl_envs.environments"

_BUILT_IN = {
    "bash": "prorl_envs.envs.bash.env:BashEnvironment",
    "code": "prorl_envs.envs.code.env:CodeEnvironment",
    "ipython": "prorl_envs.envs.ipython.env:IPythonEnvironment",
    "math": "prorl_envs.envs.math.env:MathEnvironment",
    "stem": "prorl_envs.envs.stem.env:StemEnvironment",
    "swebench": "prorl_envs.envs.swebench.env:SwebenchEnvironment",
}

type Family = type[Environment[Any]]


class Families(Mapping[str, Family]):
    """Families by name, imported when asked for: listing them costs nothing."""

    def __init__(self, targets: Mapping[str, EntryPoint]) -> None:
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> Family:
        target = self._targets[name]
        try:
            family = target.load()
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"environment {name!r} cannot be imported from {target.value}: {error}",
                hint="install what its package asks for",
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
    """Every family known on this machine. A built-in name cannot be taken by another package."""
    built_in = {name: EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    third_party = {point.name: point for point in entry_points(group=GROUP)}
    return Families(third_party | built_in)


def family(name: str) -> Family:
    """The family called `name`.

    Raises:
        InputError: there is none, or it cannot be imported.
    """
    return known(environments(), name)


def known(offered: Mapping[str, Family], name: str) -> Family:
    """One of the environments on offer.

    Raises:
        InputError: it is not among them; the hint names the closest, or all.
    """
    if name in offered:
        return offered[name]
    close = difflib.get_close_matches(name, offered, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(
        f"no environment is called {name!r}", hint=f"{hint}known: {', '.join(sorted(offered)) or 'none'}"
    )


def load_tasks(name: str, path: Path | str) -> list[Task]:
    """Read a JSONL data file of the family `name`.

    Raises:
        InputError: `file:line: field: problem`.
    """
    return read_tasks(family(name).load, Path(path))


def example_path(name: str) -> Path:
    """The family's own example data: `data/example.jsonl` beside the module of its class.

    Raises:
        InputError: no such family, or it ships no example data.
    """
    return examples_of(name, family(name))


def examples_of(name: str, chosen: Family) -> Path:
    """The example data of a class; `name` is for the message.

    Raises:
        InputError: it ships none.
    """
    module = importlib.import_module(chosen.__module__)
    path = Path(inspect.getfile(module)).parent / "data" / "example.jsonl"
    if not path.is_file():
        raise InputError(f"environment {name!r} ships no example data", hint="give a data file")
    return path
