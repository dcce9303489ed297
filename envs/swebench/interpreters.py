"""Python interpreters of this machine, by minor version."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.base import Mount

#: Script that prints facts of an interpreter, with the path of the pip wheel that comes with it (Python can
#: run it).
_PROBE = """
import glob, json, os, sys, sysconfig, ensurepip, venv
bundled = glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), "_bundled", "pip-*.whl"))
shared = glob.glob("/usr/share/python-wheels/pip-*.whl")
print(json.dumps({"version": "%d.%d.%d" % sys.version_info[:3], "prefix": os.path.realpath(sys.base_prefix),
                  "platform": sysconfig.get_platform(), "pip": (bundled + shared)[0]}))
"""
_PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python installation.

    Args:
        executable: path of the interpreter, below `prefix`.
        version: full version, such as `3.12.1`.
        prefix: directory of the installation; it and /usr suffice to run the interpreter.
        platform: such as `linux-x86_64`.
        pip: path of the pip wheel that came with the interpreter.
    """

    executable: Path
    version: str
    prefix: Path
    platform: str
    pip: Path

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]


def mounts_of(prefix: Path) -> tuple[Mount, ...]:
    """Return the mounts that an interpreter needs in a sandbox.

    It has the same path as on the host, because virtual environments refer to this path.

    Args:
        prefix: directory of the installation. Files in /usr are visible in every sandbox.
    """
    return () if prefix.is_relative_to("/usr") else (Mount(source=prefix, target=str(prefix)),)


def choose(minors: Sequence[str]) -> Interpreter:
    """Return the first of `minors` that this machine has. Blocks.

    Raises:
        EnvironmentFault: the machine has none of them.
    """
    found = interpreters()
    for minor in minors:
        if minor in found:
            return found[minor]
    raise EnvironmentFault(
        f"this machine has no Python {' or '.join(minors)}, only {', '.join(found) or 'none'}",
        hint=f"install one, for example with `uv python install {minors[0]}`",
    )


@cache
def interpreters() -> Mapping[str, Interpreter]:
    """Return the interpreters of this machine, by minor version. Queries each once per process. Blocks.

    If there are several of a version, the order of preference is: this process's own, those on PATH, of uv,
    of pyenv.
    """
    found: dict[str, Interpreter] = {}
    for executable in _candidates():
        minor = executable.name.removeprefix("python")
        if minor not in found and (interpreter := _query(executable)) and interpreter.minor == minor:
            found[minor] = interpreter
    return found


def _candidates() -> Iterator[Path]:
    """Yield executables called `pythonX.Y`; names such as `python3` could later be another version."""
    home = Path.home()
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    yield Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    for folder in folders:
        # pyenv's shims are scripts that run the currently selected version.
        if folder != pyenv / "shims":
            yield from _named(folder)
    for pattern, root in (("cpython-3.*/bin", uv), ("versions/3.*/bin", pyenv)):
        for folder in reversed(_found(root, pattern)):
            yield from _named(folder)


def _named(folder: Path) -> list[Path]:
    return [path for path in _found(folder, "python3.*") if path.name[8:].isdigit()]


def _found(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # an unreadable directory, such as another user's, is skipped
        return []


def _query(executable: Path) -> Interpreter | None:
    """Query an interpreter; return None if it does not run or cannot create a venv with pip."""
    try:
        done = subprocess.run(
            [executable, "-I", "-c", _PROBE],
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={},  # as in a sandbox: an interpreter that needs the host's LD_LIBRARY_PATH cannot run there
            check=True,
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    prefix = Path(answer["prefix"])
    minor = answer["version"].rpartition(".")[0]
    real = prefix / "bin" / f"python{minor}"
    if not real.is_file():
        return None
    return Interpreter(real, answer["version"], prefix, answer["platform"], Path(answer["pip"]))
