"""Detection of files of the agent that can run instead of the tests, or before them.

The format runs the tests on the agent's files, and a solution may install any program. So such files do not
prove that the agent cheats, and the grade only lists them.
"""

import contextlib
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.layered import LayerTree, is_whiteout

#: Maximum entries of a layer that are inspected, and maximum paths that are listed.
_ENTRIES = 200_000
_LISTED = 50
_PATH_CHARS = 500
#: Listed instead of a directory that cannot be read.
_UNREAD = "(a directory with too long a path)"
#: Maximum bytes that are read from a file that may declare plugins of pytest.
_PLUGINS_BYTES = 64 * 1024
_FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
#: Programs that tests of this format often run.
_RUNNERS = re.compile(r"(?:pytest|py\.test|uv|uvx|pip[\d.]*|python[\d.]*|curl|wget|bash|sh|env)")
#: Paths at which a changed file of the image is listed.
_SYSTEM = re.compile(r"/(?:usr|s?bin|lib\w*|opt)(?:/.*)?")
#: Exceptions: documentation, translations and lists of package managers.
_HARMLESS = re.compile(r"/usr/share/(?:doc|man|info|locale|mime|icons)/.*|.*/RECORD")
#: Files that a loader, an interpreter, a shell or pytest reads automatically.
_READ = re.compile(
    r"/etc/(?:ld\.so\.preload|ld\.so\.conf(?:\.d/.*)?|profile(?:\.d/.*)?|bash\.bashrc|environment)"
    r"|.*/(?:sitecustomize|usercustomize)\.py|.*(?:site|dist)-packages/[^/]+\.pth"
    r"|/root/\.(?:bashrc|profile|bash_profile|bash_login|pythonrc)"
    r"|.*/(?:conftest\.py|pytest\.ini|\.pytest\.ini|tox\.ini|setup\.cfg|pytest\.py|_?pytest/__init__\.py)"
)
_PLUGINS = re.compile(r".*(?:site|dist)-packages/[^/]+-info/entry_points\.txt")


class AccessibleLayer:
    """Context manager in which this user can access all directories of a layer.

    The agent may have removed the permissions. The end of the block restores the modes, because tests may
    check them. No sandbox may use the layer during the block.

    Args:
        layer: directory of the layer. No link in it is followed.
    """

    def __init__(self, layer: Path) -> None:
        self._layer = layer
        self._modes: list[tuple[str, int]] = []

    def __enter__(self) -> "AccessibleLayer":
        self.status(self._layer)
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._modes:  # the deepest first, because a restored directory may be inaccessible
            path, mode = self._modes.pop()
            with contextlib.suppress(FileNotFoundError):
                os.chmod(path, mode)  # noqa: PTH101

    def status(self, path: Path | str) -> os.stat_result:
        """Return the status of an entry; if it is a directory, make it accessible.

        Call it for the parents of an entry first.

        Raises:
            OSError: the entry does not exist.
        """
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode) and mode & 0o700 != 0o700:
            os.chmod(path, mode | 0o700)  # noqa: PTH101
            self._modes.append((str(path), mode))
        return status


def planted(layer: Path, below: Sequence[Path]) -> list[str]:
    """Return the paths of files that can run instead of the tests or before them, at most 50.

    Listed are: changed files in the image's system directories, programs that hide a program of the image,
    programs that tests often run, and files that such programs read automatically.

    Args:
        layer: directory with the agent's changes. Untrusted; no link in it is followed.
        below: layers of the image, the lowest first.
    """
    tree = LayerTree(below)
    listed: list[str] = []
    with AccessibleLayer(layer) as view:
        for count, (host, path) in enumerate(_changed(layer, view)):
            if count == _ENTRIES:
                return [*listed[: _LISTED - 1], f"more than {_ENTRIES} changes, which were not all read"]
            if path == _UNREAD or _is_listed(host, path, tree):
                listed.append(os.fsencode(path).decode(errors="replace")[:_PATH_CHARS])
                if len(listed) == _LISTED:
                    break
    return listed


def _is_listed(host: str, path: str, tree: LayerTree) -> bool:
    if _READ.fullmatch(path):
        return True
    if _PLUGINS.fullmatch(path):
        return _declares_plugin(host)
    folder, name = posixpath.split(path)
    if folder in (*_FOLDERS, "/root/.local/bin"):
        hides_program = any(_exists(f"{path_folder}/{name}", tree) for path_folder in _FOLDERS)
        return hides_program or _RUNNERS.fullmatch(name) is not None
    if not _SYSTEM.fullmatch(path) or _HARMLESS.fullmatch(path):
        return False
    return _exists(path, tree)


def _exists(path: str, tree: LayerTree) -> bool:
    try:
        return tree.kind(path) != 0
    except SandboxError:  # a circular link of the image
        return True


def _declares_plugin(host: str) -> bool:
    try:
        fd = os.open(host, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True  # unreadable, or a link: it may declare a plugin
    with os.fdopen(fd, "rb") as file:
        return b"pytest11" in file.read(_PLUGINS_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else False


def _children(folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in os.listdir(folder)]  # noqa: PTH208


def _changed(layer: Path, view: AccessibleLayer) -> Iterator[tuple[str, str]]:
    """Yield the paths of all files of a layer on the host and in the sandbox; skip whiteouts."""
    pending = [str(layer)]
    while pending:
        folder = pending.pop()
        try:
            found = [(host, view.status(host)) for host in sorted(_children(folder))]
        except OSError:  # the path is longer than the system's limit
            yield folder, _UNREAD
            continue
        for host, status in found:
            if stat.S_ISDIR(status.st_mode):
                pending.append(host)
            elif not is_whiteout(status):
                yield host, host[len(str(layer)) :]
