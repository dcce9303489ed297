"""Layered images: directories that an overlay shows as one root file system.

A layer has overlayfs's own form: a removed file is a character device 0:0, and a directory that hides those
of lower layers has the extended attribute `user.overlay.opaque` (kernel documentation,
filesystems/overlayfs). An ordinary user can create both. Layers are untrusted: their links are not followed.
"""

import json
import os
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from prorl_envs.errors import SandboxError

#: Name extension of a layered image's file.
SUFFIX = ".layers.json"
#: Most layers of one image: their paths and the other mount options have to fit into one page.
LAYER_LIMIT = 120
OPAQUE_ATTRIBUTE = "user.overlay.opaque"

_FORMAT = 2
_FILE_LIMIT = 1 << 20
_LINK_LIMIT = 40
#: Held while closed directories are open, so that no other thread restores their modes too early.
_OPENING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Settings of an image: `config` of the OCI image specification (github.com/opencontainers/image-spec).

    Args:
        env: variables of every process.
        workdir: absolute path of the initial working directory; "" is `/`.
        entrypoint, command: the default program, and its default arguments.
        shell: program of shell-form instructions.
        healthcheck: the OCI health check's fields (`Test`, and durations in nanoseconds); None without one.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    healthcheck: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredImage:
    """Layers of a root file system with the image's settings.

    Args:
        layers: directories on this machine, the lowest first; at least one.
        config: settings that the image has for its processes.
    """

    layers: tuple[Path, ...]
    config: ImageConfig = field(default_factory=ImageConfig)

    def write(self, path: Path) -> None:
        """Write the image's file, atomically. Layers below the file's directory are stored relative to it.

        Args:
            path: its name ends in `.layers.json`.

        Raises:
            OSError: it cannot be written.
        """
        base = path.parent.resolve()
        layers = [
            str(layer.relative_to(base) if layer.is_relative_to(base) else layer) for layer in self.layers
        ]
        record = {"format": _FORMAT, "layers": layers, "config": asdict(self.config)}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(path)


def is_layered(image: Path) -> bool:
    """Return True if `image` is named like a layered image's file."""
    return image.name.endswith(SUFFIX)


def read_layered(path: Path) -> LayeredImage:
    """Read a layered image's file.

    Raises:
        SandboxError: the file cannot be read or is not a layered image's, or a layer is missing.
    """
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_FILE_LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise SandboxError(f"cannot read the image {path}: {error}") from error
    try:
        if record["format"] != _FORMAT:
            raise SandboxError(
                f"the image {path} has format {record['format']}, not {_FORMAT}", hint="build it again"
            )
        layers = tuple(path.parent.resolve() / str(layer) for layer in record["layers"])
        image = LayeredImage(layers=layers, config=_config(record["config"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise SandboxError(f"the file {path} is not a layered image", hint="build it again") from error
    check_layers(path, image.layers)
    return image


def _config(record: Mapping[str, Any]) -> ImageConfig:
    lists = ("entrypoint", "command", "shell")
    fields: dict[str, Any] = {name: tuple(map(str, record[name])) for name in lists if name in record}
    return ImageConfig(**{**record, **fields})


def check_layers(path: Path, layers: Sequence[Path]) -> None:
    """Raise SandboxError if the image file `path` has no layers, too many layers or missing layers."""
    if not 1 <= len(layers) <= LAYER_LIMIT:
        raise SandboxError(f"the image {path} has {len(layers)} layers, not 1 to {LAYER_LIMIT}")
    for layer in layers:
        if not layer.is_dir():
            raise SandboxError(
                f"the image {path} has lost its layer {layer.name}",
                hint="it was evicted; build the image again",
            )


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """File or directory of an image, found by a path.

    Args:
        path: absolute path inside, with all links resolved; its parts need not exist.
        hosts: host paths that form the entry, the topmost first; empty if it does not exist.
        status: status of the first host path; never that of a link.
    """

    path: str
    hosts: tuple[str, ...]
    status: os.stat_result | None

    @property
    def kind(self) -> int:
        """File type (`stat.S_IFDIR` ...); 0 if the entry does not exist."""
        return 0 if self.status is None else stat.S_IFMT(self.status.st_mode)


class LayerTree:
    """Merged view of layers for the host, as an overlay shows them. Never follows a link on the host.

    Args:
        layers: directories, the lowest first.
    """

    def __init__(self, layers: Sequence[Path]) -> None:
        self.layers = tuple(layers)
        self._root = tuple(str(layer) for layer in reversed(self.layers))

    def find(self, path: str) -> Path | None:
        """Return the host path of an entry, which may itself be a link; None if there is none.

        Args:
            path: absolute inside, without links among its parents (see `resolve`).
        """
        hosts = self._root
        for part in PurePosixPath(path).parts[1:]:
            hosts, _ = _below(hosts, part)
        return Path(hosts[0]) if hosts else None

    def locate(self, target: str) -> LayerEntry:
        """Follow an absolute path inside, and return the entry there.

        Raises:
            SandboxError: its links form a loop.
        """
        pending = list(reversed(PurePosixPath(target).parts[1:]))
        done: list[str] = []
        levels = [self._root]  # the host paths of the root directory, and of each part in `done`
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                done, levels = done[:-1], levels[: max(len(levels) - 1, 1)]
                continue
            hosts, found = _below(levels[-1], part)
            if found is None or not stat.S_ISLNK(found.st_mode):
                done.append(part)
                levels.append(hosts)
                continue
            links += 1
            if links > _LINK_LIMIT:
                raise SandboxError(f"the image's {target} is a link that forms a loop")
            destination = PurePosixPath(_with_access(os.readlink, hosts[0]))
            if destination.is_absolute():
                done, levels = [], levels[:1]
            pending += reversed([part for part in destination.parts if part != "/"])
        hosts = levels[-1]
        status = _with_access(os.lstat, hosts[0]) if hosts else None
        return LayerEntry("/" + "/".join(done), hosts, status)

    def resolve(self, target: str) -> str:
        """Return an absolute path inside with its links resolved; its parts need not exist.

        Raises:
            SandboxError: its links form a loop.
        """
        return self.locate(target).path

    def kind(self, path: str) -> int:
        """Return the file type of the entry at a path (`stat.S_IFDIR` ...); 0 if there is none.

        Raises:
            SandboxError: its links form a loop.
        """
        return self.locate(path).kind

    def read(self, path: str, limit: int) -> str | None:
        """Return the text of the regular file at a path; None if there is none, or if it is too large.

        Args:
            limit: most bytes of the file.

        Raises:
            SandboxError: its links form a loop.
            OSError: this user may not read it.
        """
        found = self.locate(path)
        if found.status is None or not stat.S_ISREG(found.status.st_mode) or found.status.st_size > limit:
            return None
        return _with_access(lambda host: Path(host).read_text(errors="surrogateescape"), found.hosts[0])


def children(places: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the entries of a merged directory: by name, the host paths that form the entry, topmost first.

    Args:
        places: host paths that form the directory, topmost first. A file hides those below it.
    """
    found: dict[str, list[Path]] = {}
    closed: set[str] = set()
    for place in places:
        if not stat.S_ISDIR(place.lstat().st_mode):
            break
        with os.scandir(place) as entries:
            for entry in entries:
                _add_child(found, closed, entry)
    return found


def _add_child(found: dict[str, list[Path]], closed: set[str], entry: "os.DirEntry[str]") -> None:
    name, path = entry.name, Path(entry.path)
    if name in closed:
        return
    if entry.is_dir(follow_symlinks=False):
        found.setdefault(name, []).append(path)
        if is_opaque(path):
            closed.add(name)
        return
    closed.add(name)
    if name not in found and not is_whiteout(entry.stat(follow_symlinks=False)):
        found[name] = [path]


def _below(hosts: Sequence[str], name: str) -> tuple[tuple[str, ...], os.stat_result | None]:
    """Return the host paths that form the entry `name` of a merged directory, and the status of the first."""
    found: list[str] = []
    first: os.stat_result | None = None
    for host in hosts:
        path = f"{host}/{name}"
        try:
            status = _with_access(os.lstat, path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISDIR(status.st_mode):
            if first is None and not is_whiteout(status):
                return (path,), status
            break
        found.append(path)
        first = first or status
        if len(hosts) > 1 and is_opaque(path):
            break
    return tuple(found), first


def _with_access[T](call: Callable[[str], T], path: str) -> T:
    """Call `call` with a host path. Meanwhile, grant this user access to its own directories on the path.

    A layer may have directories that deny it: the emulated root that created them could enter nevertheless.

    Raises:
        OSError: as `call` does.
    """
    try:
        return call(path)
    except PermissionError:
        with _OPENING, ExitStack() as opened:
            for place in (*reversed(Path(path).parents), Path(path)):
                status = place.lstat()
                mode = stat.S_IMODE(status.st_mode)
                if stat.S_ISDIR(status.st_mode) and mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
                    place.chmod(mode | 0o700)
                    opened.callback(place.chmod, mode)
            return call(path)


def _opaque_attribute(directory: str) -> bytes:
    return os.getxattr(directory, OPAQUE_ATTRIBUTE, follow_symlinks=False)


def is_whiteout(status: os.stat_result) -> bool:
    """Return True if an entry of a layer marks a removed file."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(directory: Path | str) -> bool:
    """Return True if a directory of a layer hides the same directory of lower layers."""
    try:
        return _with_access(_opaque_attribute, str(directory)) == b"y"
    except OSError:  # the attribute is not set, or the file system has no attributes
        return False
