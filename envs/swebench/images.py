"""Location of an instance's image on this machine, and ways to obtain it."""

import asyncio
import fnmatch
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from prorl_envs.env.node import Node
from prorl_envs.envs.swebench.options import ImageOptions
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import EnvironmentFault, InputError
from prorl_envs.images.sources import Source, parse_source
from prorl_envs.images.template import ImageTemplate

_HINT = "options.images says where: folder, lookup, definition, or pull: true for the registry"


class Images:
    """Images of instances, by the family's options: the lookup file, then the folder, then a build from a
    definition, then a pull."""

    def __init__(self, options: ImageOptions) -> None:
        self._options = options

    def missing(self, task: SwebenchTask) -> str:
        """Return why there is no image of `task`, in a sentence; empty if there is one or it can be obtained.
        Blocks."""
        try:
            if self.find(task) is not None or self._options.definition is not None:
                return ""
        except InputError as error:
            return error.message
        if self._options.pull and task.image:
            return ""
        if task.image:
            return "there is no image of it here: options.images.pull: true pulls the one that its row names"
        return f"there is no image of it, and its row names none: {_HINT}"

    def find(self, task: SwebenchTask) -> Path | str | None:
        """Return the path or address the options give for `task`; None if it is neither looked up nor in the
        folder.

        Raises:
            InputError: the lookup file cannot be read, or names a missing image.
        """
        options = self._options
        if options.lookup is not None:
            named = _looked_up(
                options.lookup, options.lookup.stat().st_mtime_ns if options.lookup.exists() else 0
            )
            if (found := named.get(task.id)) is not None:
                if "://" in found:
                    return found
                path = options.lookup.parent / Path(found).expanduser()
                if not path.exists():
                    raise InputError(f"{options.lookup}: {task.id}: there is no {path}")
                return path
        if options.folder is not None:
            return _in_folder(options.folder, options.patterns, task)
        return None

    async def obtain(self, node: Node, task: SwebenchTask, progress: Callable[[str], None]) -> Path:
        """Return the image of `task`; pull or build it if necessary.

        Raises:
            EnvironmentFault: there is none, and the options define no way to obtain it.
            SandboxError: pulling or building it failed.
        """
        if reason := await asyncio.to_thread(self.missing, task):
            raise EnvironmentFault(reason, hint=_HINT)
        source = await asyncio.to_thread(self._source, task)
        if isinstance(source, Path):
            return source.absolute()
        found = await node.images(progress).resolve(source)
        assert found is not None
        return found

    def _source(self, task: SwebenchTask) -> "Path | Source | ImageTemplate":
        found = self.find(task)
        if isinstance(found, Path):
            return found
        if found is None and self._options.definition is not None:
            known = {
                "instance_id": task.id, "repo": task.repo, "base_commit": task.base_commit, "image":
                task.image,
            }  # fmt: skip
            return ImageTemplate.read(self._options.definition, name=task.id.lower(), variables=known)
        return parse_source(found or self.address(task))

    def address(self, task: SwebenchTask) -> str:
        """Return the address that Apptainer pulls for the row's image."""
        registry = self._options.registry.strip("/")
        name = task.image
        if registry:
            first, _, rest = name.partition("/")
            # A first part with a dot or a port is already a registry's name.
            name = rest if rest and ("." in first or ":" in first) else name
            name = f"{registry}/{name}"
        return f"docker://{name}"


@lru_cache(maxsize=8)
def _looked_up(path: Path, changed: int) -> Mapping[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"options.images.lookup: {path}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InputError(f"options.images.lookup: {path}: not a map from instances to paths or addresses")
    return found


def _in_folder(folder: Path, patterns: tuple[str, ...], task: SwebenchTask) -> Path | None:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"options.images.folder: {folder}: {error.strerror}") from error
    image = task.image.rpartition("/")[2].partition(":")[0].partition("@")[0]
    known = {"id": task.id, "name": image or task.id, "repo": task.repo.replace("/", "__")}
    for pattern in patterns:
        try:
            wanted = pattern.format(**{key: _literal(value) for key, value in known.items()}).lower()
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(f"options.images.patterns: {pattern!r}: braces hold id, name or repo") from error
        if found := next((name for name in names if fnmatch.fnmatchcase(name.lower(), wanted)), None):
            return folder / found
    return None


def _literal(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)
