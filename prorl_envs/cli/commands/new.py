"""`prorl-envs new`: generation of a package with a new environment that works without changes."""

import importlib.util
import keyword
import re
import shlex
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import yaml

from prorl_envs.cli.output.console import err, out
from prorl_envs.env.registry import environments
from prorl_envs.errors import InputError
from prorl_envs.extras import install_packages
from prorl_envs.gym.registration import camel
from prorl_envs.nemo.examples import (
    CASES,
    EXAMPLE,
    METRICS,
    ROLLOUTS,
    example_rows,
    read_jsonl,
    verifier_cases,
    write_jsonl,
)
from prorl_envs.nemo.rows import unstarted

FLAVOURS = ("bash", "editor", "ipython")
#: Placeholder of the environment's name in recorded files.
RECORDED_NAME = "@name@"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def new(name: str, flavour: str, parent: Path) -> Path:
    """Write the package `parent/name`.

    Args:
        name: name of the environment and of the Python package.
        flavour: tools of the generated environment: bash, editor or ipython.
        parent: folder in which the package is created; it is created if missing.

    Returns:
        The folder of the package.

    Raises:
        InputError: the name is invalid or taken, or the folder cannot be written.
    """
    _check(name, flavour)
    folder = parent / name
    if folder.exists():
        raise InputError(f"{folder} already exists", hint="choose another name, or another folder: --in")
    try:
        for path, text in _files(name, flavour).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        _write_nemo_examples(folder, name)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}", hint="another folder: --in") from error
    err.print(f"the environment {name} is in {folder}. Next:")
    out.print(
        f"{install_packages('-e', f'{folder}[dev]')}\nprorl-envs validate {name}\n"
        f"{shlex.join([sys.executable, '-m', 'pytest', str(folder)])}",
        soft_wrap=True,
    )
    return folder


def _check(name: str, flavour: str) -> None:
    if flavour not in FLAVOURS:
        raise InputError(f"there is no flavour {flavour!r}", hint=f"flavours: {', '.join(FLAVOURS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InputError(
            f"{name!r} cannot name an environment", hint="use 1 to 40 small letters, digits and underscores"
        )
    if name in environments():
        raise InputError(f"an environment {name!r} is registered already", hint="choose another name")
    if importlib.util.find_spec(name) is not None:
        raise InputError(f"a Python module {name!r} is installed already", hint="choose another name")


def _write_nemo_examples(folder: Path, name: str) -> None:
    """Write the example rows, by the generated class; and the verifier's cases, from recorded rollouts."""
    spec = importlib.util.spec_from_file_location(f"{name}.env", folder / name / "env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    instance = unstarted(getattr(module, f"{camel(name)}Environment"))
    server = folder / "nemo" / "server"
    rows = example_rows(instance, folder / name / "data" / "example.jsonl")
    write_jsonl(server / EXAMPLE, rows)
    write_jsonl(server / CASES, verifier_cases(rows[0], read_jsonl(server / ROLLOUTS)[0]))


def _files(name: str, flavour: str) -> dict[str, str]:
    """Return the package's files by path."""
    root = files("prorl_envs.cli").joinpath("scaffold")
    common, specific = root.joinpath("common"), root.joinpath(flavour)
    values = {"name": name, "Class": camel(name), "Id": camel(name), "dashed": name.replace("_", "-")}
    texts: dict[str, str] = yaml.safe_load(specific.joinpath("texts.yaml").read_text("utf-8"))
    values |= {key: Template(text).substitute(values).rstrip() for key, text in texts.items()}

    def filled(template: Traversable) -> str:
        return Template(template.read_text("utf-8")).substitute(values)

    def recorded(path: str) -> str:
        """Return a file that scripts/nemo-examples.sh recorded with an environment of this flavour."""
        return specific.joinpath(Path(path).name).read_text("utf-8").replace(RECORDED_NAME, name)

    server, environment = "nemo/server", "nemo/environment"
    return {
        "pyproject.toml": filled(common / "pyproject.toml.txt"),
        "README.md": filled(common / "README.md.txt"),
        f"{name}/__init__.py": filled(common / "init.txt"),
        f"{name}/env.py": filled(specific / "env.py.txt"),
        f"{name}/data/example.jsonl": specific.joinpath("example.jsonl").read_text("utf-8"),
        f"tests/test_{name}.py": filled(common / "test.py.txt"),
        f"{server}/app.py": filled(common / "app.py.txt"),
        f"{server}/task_data.py": filled(common / "task_data.py.txt"),
        f"{server}/configs/prorl_{name}.yaml": filled(common / "server.yaml.txt"),
        f"{server}/configs/single_agent_turn.yaml": filled(common / "single_agent_turn.yaml.txt"),
        f"{server}/requirements.txt": filled(common / "requirements.txt"),
        f"{server}/tests/test_app.py": filled(common / "test_app.py.txt"),
        f"{server}/{ROLLOUTS}": recorded(ROLLOUTS),
        f"{server}/{METRICS}": recorded(METRICS),
        f"{environment}/config.yaml": filled(common / "config.yaml.txt"),
        f"{environment}/manifest.yaml": filled(common / "manifest.yaml.txt"),
    }
