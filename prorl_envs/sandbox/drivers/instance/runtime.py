"""The Python of a sandbox's first process, copied into one directory that is mounted into any image.

An image may have no Python, or another libc. So a Python of the host imports all modules of the tool servers
and lists the files it loaded. The first process needs only these files, their shared libraries and the
dynamic loader, and a sandbox sees nothing else of the host's Python.
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
from prorl_envs.sandbox.template.process import BOOT, environment
from prorl_envs.sandbox.template.template import TemplateSpec

#: Path of the runtime inside a sandbox.
PLACE = "/.prorl"
CODE = f"{PLACE}/code"
_LIBRARIES = f"{PLACE}/lib"
#: Module of `BOOT`; the imports of its other functions differ from those of tool servers.
_TEMPLATE = "prorl_envs.sandbox.template.zygote"
_SUBPACKAGES = ("sandbox", "tools")
_TIMEOUT_S = 120.0

_TRACE = """\
import importlib, importlib.machinery, json, sys
sys.path.extend(path for path in json.loads(sys.argv[1]) if path not in sys.path)
for name in json.loads(sys.argv[2]):
    module, _, function = name.partition(":")
    loaded = importlib.import_module(module)
    if function:
        getattr(loaded, function)()
modules = {}
for name, module in list(sys.modules.items()):
    origin = getattr(module, "__file__", None)
    spec, parent = getattr(module, "__spec__", None), sys.modules.get(name.rpartition(".")[0])
    if spec is not None and spec.name != name and hasattr(parent, "__path__"):
        # An alias of this interpreter (collections.abc since 3.13), which another may import as a file.
        found = importlib.machinery.PathFinder.find_spec(name, parent.__path__)
        origin = found.origin if found is not None else origin
    if origin and name != "__main__":
        modules[name] = origin
with open("/proc/self/maps") as maps:
    mapped = sorted({line.split(maxsplit=5)[5].strip() for line in maps if len(line.split()) > 5})
print(json.dumps({"modules": modules, "mapped": [path for path in mapped if path.startswith("/")]}))
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A copied Python runtime.

    Args:
        path: the directory on the host.
        loader: name of the dynamic loader, in `lib`; empty for a static interpreter.
        modules: all modules that the first process has to import.
    """

    path: Path
    loader: str
    modules: tuple[str, ...]

    def command(self) -> tuple[str, ...]:
        """Return the command that starts the first process with the files of this runtime alone."""
        program = f"{PLACE}/python/bin/python3"
        return (*self._loaded(program), "-I", "-S", "-X", "utf8", "-c", BOOT, CODE)

    def command_of_host(self) -> tuple[str, ...]:
        """Return the command for a sandbox that shows the host's Python at the host's paths."""
        return (*self._loaded(sys.executable), "-I", "-c", BOOT, CODE)

    def _loaded(self, program: str) -> tuple[str, ...]:
        if not self.loader:
            return (program,)
        return (f"{_LIBRARIES}/{self.loader}", "--library-path", _LIBRARIES, program)


def copy_runtime(target: Path, templates: Mapping[str, TemplateSpec]) -> Runtime:
    """Copy the files that the first process needs into `target`. Blocks, for some 0.5 s.

    Args:
        target: path of the new directory, on a local disk.
        templates: the templates whose entries the first process will run. The preload functions of `base` are
            called once, to find the modules that they import.

    Raises:
        SandboxError: the modules cannot be traced or copied.
    """
    wanted = [_TEMPLATE, *templates["base"].preload]
    wanted += [entry.partition(":")[0] for spec in templates.values() for entry in spec.entries]
    found = _trace(wanted)
    stdlib = Path(sysconfig.get_path("stdlib"))
    home = target / "python" / stdlib.relative_to(sys.base_prefix)
    try:
        for name, origin in found["modules"].items():
            _copy(Path(origin), _copy_target(name, Path(origin), stdlib, home, target / "code"))
        _copy(stdlib / "os.py", home / "os.py")  # an interpreter finds its standard library by this file
        for source in _package_code():
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
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _TRACE]
    try:
        done = subprocess.run(
            [*command, json.dumps(paths), json.dumps(list(wanted))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            cwd="/",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"cannot start this Python to list the files that it loads: {error}") from error
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip()[-500:]
        raise SandboxError(f"cannot import the modules of tool servers: {message}")
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def _copy_target(name: str, origin: Path, stdlib: Path, home: Path, code: Path) -> Path:
    """Return the path to which a module's file is copied."""
    parts = name.split(".")
    if origin.is_relative_to(stdlib) and "-packages" not in str(origin.relative_to(stdlib)):
        return home / origin.relative_to(stdlib)
    folder = parts if origin.name.startswith("__init__.") else parts[:-1]
    return code.joinpath(*folder, origin.name)


def _package() -> Path:
    return Path(prorl_envs.__file__).resolve().parent


def _package_code() -> Iterator[Path]:
    """Yield this package's modules that run in a sandbox. They contain no tasks."""
    package = _package()
    yield from (package / "__init__.py", package / "errors.py")
    for name in _SUBPACKAGES:
        yield from (package / name).rglob("*.py")


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix == ".py":
        cached = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        if cached.exists():  # valid for the source's mtime, which `copy2` preserves
            (target.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy2(cached, target.parent / "__pycache__" / cached.name)


def _copy_libraries(libraries: Iterable[Path], target: Path) -> None:
    """Copy shared libraries with their symbolic links: programs often load them by the name of a link."""
    target.mkdir()
    for library in libraries:
        if ".so" not in library.name:
            continue  # another mapped file, such as the locale archive
        shutil.copy(library, target / library.name)
        stem = library.name.partition(".so")[0]
        for link in library.parent.glob(f"{stem}.so*"):
            if link.is_symlink() and link.resolve() == library and not (target / link.name).exists():
                (target / link.name).symlink_to(library.name)
