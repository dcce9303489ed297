"""The Python of a sandbox's first process, in one directory that is mounted into any image.

An image need have no Python, or another libc. So an interpreter of the host's is asked what it has loaded
once it has imported everything a tool server needs; those files, with the libraries and the loader they were
loaded by, are all it needs inside, and all that a sandbox gets to see of the host's.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import prorl_envs
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.template import TemplateSpec
from prorl_envs.sandbox.template_process import BOOT, environment

#: Where it appears in a sandbox.
PLACE = "/.prorl"
CODE = f"{PLACE}/code"
_LIBRARIES = f"{PLACE}/lib"
_ROOMS = ("sandbox", "tools")
_TIMEOUT_S = 120.0

_TRACE = """\
import importlib, json, sys
sys.path.extend(path for path in json.loads(sys.argv[1]) if path not in sys.path)
for name in json.loads(sys.argv[2]):
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    if function:
        getattr(loaded, function)()
modules = {}
for name, module in list(sys.modules.items()):
    origin = getattr(module, "__file__", None)
    if origin and name != "__main__":
        modules[name] = origin
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(maxsplit=5)[5].strip() for line in maps if len(line.split()) > 5})
print(json.dumps({"modules": modules, "mapped": [path for path in mapped if path.startswith("/")]}))
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What was gathered.

    Args:
        path: the directory on the host.
        loader: name of the program that loads others, in `lib`; empty for a static interpreter.
        modules: all that its first process has to import.
    """

    path: Path
    loader: str
    modules: tuple[str, ...]

    def command(self) -> tuple[str, ...]:
        """What starts the first process with nothing but what is here."""
        own = f"{PLACE}/python/bin/python3"
        return (*self._loaded(own), "-I", "-S", "-X", "utf8", "-c", BOOT, CODE)

    def command_of_host(self) -> tuple[str, ...]:
        """What starts it in a sandbox that shows the host's Python at the host's paths."""
        return (*self._loaded(sys.executable), "-I", "-c", BOOT, CODE)

    def _loaded(self, program: str) -> tuple[str, ...]:
        if not self.loader:
            return (program,)
        return (f"{_LIBRARIES}/{self.loader}", "--library-path", _LIBRARIES, program)


def gather(target: Path, templates: Mapping[str, TemplateSpec]) -> Runtime:
    """Copy what the first process needs into `target`, which is made. Blocks, for some 0.5 s.

    Args:
        target: a new directory on a local disk.
        templates: whose entries it will run; what `base` preloads is done once to see what it imports.

    Raises:
        SandboxError: this interpreter cannot be taken apart.
    """
    wanted = [*templates["base"].preload]
    wanted += [entry.partition(":")[0] for spec in templates.values() for entry in spec.entries]
    found = _trace(wanted)
    stdlib = Path(sysconfig.get_path("stdlib"))
    home = target / "python" / stdlib.relative_to(sys.base_prefix)
    try:
        for name, origin in found["modules"].items():
            _copy(Path(origin), _place(name, Path(origin), stdlib, home, target / "code"))
        _copy(stdlib / "os.py", home / "os.py")  # by which an interpreter knows its library
        for source in _own_code():
            _copy(source, target / "code" / source.relative_to(_package().parent))
        program = Path(sys.executable).resolve()
        _copy(program, target / "python" / "bin" / "python3")
        modules = {Path(origin).resolve() for origin in found["modules"].values()}
        libraries = [path for path in map(Path, found["mapped"]) if path not in modules | {program}]
        _copy_libraries(libraries, target / "lib")
    except OSError as error:
        raise SandboxError(f"cannot copy this Python for sandboxes: {error}") from error
    loader = next((path.name for path in libraries if path.name.startswith(("ld-", "ld."))), "")
    return Runtime(target, loader, tuple(found["modules"]))


def _trace(wanted: Iterable[str]) -> dict[str, dict[str, str]]:
    paths = [path for path in sys.path if path and Path(path).is_dir()]
    paths += [str(_package().parent)]
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-S",
                "-X",
                "utf8",
                "-c",
                _TRACE,
                json.dumps(paths),
                json.dumps(list(wanted)),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            cwd="/",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"this Python cannot be started to see what it loads: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"what tool servers import cannot be imported: {said}")
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def _place(name: str, origin: Path, stdlib: Path, home: Path, code: Path) -> Path:
    """Where a module's file goes."""
    parts = name.split(".")
    if origin.is_relative_to(stdlib) and "-packages" not in str(origin.relative_to(stdlib)):
        return home / origin.relative_to(stdlib)
    folder = parts if origin.name.startswith("__init__.") else parts[:-1]
    return code.joinpath(*folder, origin.name)


def _package() -> Path:
    return Path(prorl_envs.__file__).resolve().parent


def _own_code() -> Iterator[Path]:
    """What a Python session needs beside: the rooms that come into a sandbox, and no tasks."""
    package = _package()
    yield from (package / "__init__.py", package / "errors.py")
    for room in _ROOMS:
        yield from (package / room).glob("*.py")


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix == ".py":
        cached = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        if cached.exists():  # good as long as the source has the time it had, which `copy2` keeps
            (target.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy2(cached, target.parent / "__pycache__" / cached.name)


def _copy_libraries(libraries: Iterable[Path], target: Path) -> None:
    """By every name they go by where they lie: what is looked for is often a link's."""
    target.mkdir()
    for library in libraries:
        if ".so" not in library.name:
            continue  # such as the locale archive
        shutil.copy(library, target / library.name)
        stem = library.name.partition(".so")[0]
        for link in library.parent.glob(f"{stem}.so*"):
            if link.is_symlink() and link.resolve() == library and not (target / link.name).exists():
                (target / link.name).symlink_to(library.name)
