"""`prorl-envs new`: a package with an environment of one's own, which works as it is."""

import importlib.util
import json
import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import yaml

from prorl_envs.cli.console import err, out
from prorl_envs.env.registry import environments
from prorl_envs.env.rows import rows
from prorl_envs.errors import InputError
from prorl_envs.gym.registration import camel
from prorl_envs.nemo.rows import nemo_row, unstarted

FLAVOURS = ("bash", "editor", "ipython")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True)
class Words:
    """How a name is written."""

    name: str

    @property
    def camel(self) -> str:
        """`lab_book` as `LabBook`: of its class, and in its gymnasium id."""
        return camel(self.name)

    @property
    def dashed(self) -> str:
        return self.name.replace("_", "-")


def new(name: str, flavour: str, parent: Path) -> Path:
    """Write the package `parent/name`.

    Args:
        name: of the environment, and of the Python package.
        flavour: which tools it begins with: bash, editor or ipython.
        parent: where; made where missing.

    Returns:
        its folder.

    Raises:
        InputError: the name cannot be one, or is taken; or nothing can be written there.
    """
    _check(name, flavour)
    folder = parent / name
    if folder.exists():
        raise InputError(f"{folder} is already there", hint="choose another name, or another place: --in")
    try:
        for path, text in _files(Words(name), flavour).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        (folder / "nemo" / "data").mkdir()
        (folder / "nemo" / "data" / "nemo_example.jsonl").write_text(_nemo_rows(folder, Words(name)), "utf-8")
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}", hint="another place: --in") from error
    err.print(f"the environment {name} is in {folder}. Next:")
    out.print(f"pip install -e {folder}\nprorl-envs validate {name}\npytest {folder}", soft_wrap=True)
    return folder


def _check(name: str, flavour: str) -> None:
    if flavour not in FLAVOURS:
        raise InputError(f"there is no flavour {flavour!r}", hint=f"one of {', '.join(FLAVOURS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InputError(f"{name!r} cannot name an environment", hint="small letters, digits and _; 1 to 40")
    if name in environments():
        raise InputError(f"an environment {name!r} is registered already", hint="choose another name")
    if importlib.util.find_spec(name) is not None:
        raise InputError(f"a Python module {name!r} is installed already", hint="choose another name")


def _nemo_rows(folder: Path, words: Words) -> str:
    """The examples as NeMo Gym's rows, rendered by the class that was just written."""
    spec = importlib.util.spec_from_file_location(f"{words.name}.env", folder / words.name / "env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    instance = unstarted(getattr(module, f"{words.camel}Environment"))
    made = (nemo_row(instance, row) for _, row in rows(folder / words.name / "data" / "example.jsonl"))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)


def _files(words: Words, flavour: str) -> dict[str, str]:
    """The package's files by path."""
    root = files("prorl_envs.cli").joinpath("scaffold")
    common, own = root.joinpath("common"), root.joinpath(flavour)
    given = {"name": words.name, "Class": words.camel, "Id": words.camel, "dashed": words.dashed}
    texts: dict[str, str] = yaml.safe_load(own.joinpath("texts.yaml").read_text("utf-8"))
    given |= {key: Template(text).substitute(given).rstrip() for key, text in texts.items()}

    def filled(template: Traversable) -> str:
        return Template(template.read_text("utf-8")).substitute(given)

    name = words.name
    return {
        "pyproject.toml": filled(common / "pyproject.toml.txt"),
        "README.md": filled(common / "README.md.txt"),
        f"{name}/__init__.py": filled(common / "init.txt"),
        f"{name}/env.py": filled(own / "env.py.txt"),
        f"{name}/data/example.jsonl": own.joinpath("example.jsonl").read_text("utf-8"),
        f"tests/test_{name}.py": filled(common / "test.py.txt"),
        "nemo/app.py": filled(common / "app.py.txt"),
        f"nemo/configs/prorl_{name}.yaml": filled(common / "server.yaml.txt"),
        "nemo/requirements.txt": "prorl-envs[nemo]\n",
    }
