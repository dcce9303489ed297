"""Shell commands that install missing packages into the environment of the running interpreter."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = "prorl-envs"
_EXTRA = re.compile(r"""\s*;.*\bextra\s*==\s*['"]([\w-]+)['"]""")


def install_extras(*extras: str) -> str:
    """Return a shell command that installs extras of this package.

    From a checkout, the command installs the checkout with the extras. Otherwise it names the packages of the
    extras, because the wheel of this package may not be on an index.

    Args:
        extras: as in `[project.optional-dependencies]` of pyproject.toml.
    """
    try:
        installed = distribution(_NAME)
    except PackageNotFoundError:  # on PYTHONPATH
        installed = None
    folder, editable = _source(installed)
    if installed is None or (folder / "pyproject.toml").is_file():
        return install_packages(*(["-e"] if editable else []), f"{folder}[{','.join(extras)}]")
    return install_packages(
        *(
            requirement.partition(";")[0].strip()
            for requirement in installed.requires or ()
            if (found := _EXTRA.search(requirement)) and found[1] in extras
        )
    )


def install_packages(*arguments: str) -> str:
    """Return a shell command that installs packages into the environment of the running interpreter.

    Args:
        arguments: requirements, or other arguments of `pip install`.
    """
    if importlib.util.find_spec("pip") is None and (uv := _uv()):
        return shlex.join([uv, "pip", "install", "--python", sys.executable, *arguments])
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def _uv() -> str:
    """Return the path of uv in PATH or beside the interpreter, or ""."""
    beside = Path(sys.executable).with_name("uv")
    return shutil.which("uv") or (str(beside) if beside.exists() else "")


def _source(installed: Distribution | None) -> tuple[Path, bool]:
    """Return the directory of this package's source, and whether the package runs from there."""
    url = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    if "dir_info" in url:
        return Path(unquote(urlsplit(url["url"]).path)), url["dir_info"].get("editable", False)
    return Path(__file__).parent.parent, True
