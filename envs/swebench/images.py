"""Location of an instance's image on this machine, and methods to obtain it."""

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

_HINT = "set options.images: folder, lookup, definition, or pull: true for the registry"


class Images:
    """Images of instances.

    An image comes from the first of these that the options define and that has it: the lookup file, the
    folder, a build from a definition, a pull from a registry.
    """

    def __init__(self, options: ImageOptions) -> None:
        self._options = options

    def missing(self, task: SwebenchTask) -> str:
        """Return why no image of `task` exists or can be obtained, or "". Blocks."""
        try:
            if self.find(task) is not None or self._options.definition is not None:
                return ""
        except InputError as error:
            return error.message
        if self._options.pull and task.image:
            return ""
        if task.image:
            return "there is no image of it here: options.images.pull: true pulls the image of its row"
        return f"there is no image of it, and its row names no image: {_HINT}"

    def find(self, task: SwebenchTask) -> Path | str | None:
        """Return the path or address of the image of `task` in the lookup file or the folder, or None.

        Raises:
            InputError: the lookup file cannot be read, or names a missing image.
        """
        options = self._options
        if options.lookup is not None:
            table = _lookup_table(
                options.lookup, options.lookup.stat().st_mtime_ns if options.lookup.exists() else 0
            )
            if (found := table.get(task.id)) is not None:
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
            EnvironmentFault: there is no image, and the options define no method to obtain it.
            SandboxError: pulling or building the image failed.
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
            variables = {
                "instance_id": task.id,
                "repo": task.repo,
                "base_commit": task.base_commit,
                "image": task.image,
            }
            return ImageTemplate.read(self._options.definition, name=task.id.lower(), variables=variables)
        return parse_source(found or self.address(task))

    def address(self, task: SwebenchTask) -> str:
        """Return the address of the image that the row names, at the registry of the options."""
        registry = self._options.registry.strip("/")
        name = task.image
        if registry:
            first, _, rest = name.partition("/")
            # If the first part has a dot or a colon, it is the name of a registry, which is replaced.
            name = rest if rest and ("." in first or ":" in first) else name
            name = f"{registry}/{name}"
        return f"docker://{name}"


@lru_cache(maxsize=8)
def _lookup_table(path: Path, modified_ns: int) -> Mapping[str, str]:
    """Read a lookup file. `modified_ns` is part of the cache's key: a changed file is read again."""
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
    fields = {"id": task.id, "name": image or task.id, "repo": task.repo.replace("/", "__")}
    for pattern in patterns:
        try:
            glob = pattern.format(**{key: _literal(value) for key, value in fields.items()}).lower()
        except (KeyError, IndexError, ValueError) as error:
            raise InputError(
                f"options.images.patterns: {pattern!r}: only {{id}}, {{name}}, {{repo}}"
            ) from error
        if found := next((name for name in names if fnmatch.fnmatchcase(name.lower(), glob)), None):
            return folder / found
    return None


def _literal(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)
