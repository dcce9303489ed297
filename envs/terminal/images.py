"""Images of tasks: built from a machine's Dockerfile or pulled, once per content."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prorl_envs.env.node import Node
from prorl_envs.env.task_files import content_of
from prorl_envs.envs.terminal.files import Files, paths_below
from prorl_envs.envs.terminal.task import Machine, dockerfile_of
from prorl_envs.errors import EnvironmentFault, InputError
from prorl_envs.images.digest import of_value, place_of
from prorl_envs.images.dockerfile.build import BuildProgress, DockerfileBuilder
from prorl_envs.images.dockerfile.run import RunFailed
from prorl_envs.images.scratch import make_scratch
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import LayeredImage, read_layered

_NOT_IN_NAMES = re.compile(r"[^a-z0-9._-]+")
#: Files in the folder of Terminal-Bench's Dockerfile that an image must not contain.
_HIDDEN = frozenset({"solution.sh", "solution.yaml", "task.yaml"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """An image on this machine.

    Args:
        path: the `.layers.json` file of the image.
        image: content of that file.
    """

    path: Path
    image: LayeredImage

    def with_layers(self, layers: Sequence[Path], path: Path) -> "TaskImage":
        """Write the image with additional layers, the lowest first, as the file `path`; return it.

        Raises:
            OSError: the file cannot be written.
        """
        image = replace(self.image, layers=(*self.image.layers, *layers))
        image.write(path)
        return TaskImage(path=path, image=image)


async def task_image(
    node: Node,
    files: Files,
    machine: Machine,
    *,
    timeout_factor: float = 1.0,
    progress: Callable[[str], None] = lambda line: None,
) -> TaskImage:
    """Return the image of a machine; build or pull it if necessary.

    An image is built again if the files of its folder or the bases of the builder change; it is not built
    again if a tag refers to a new image in the registry.

    Args:
        node: provides the builder.
        files: the task directory.
        machine: the machine.
        timeout_factor: factor of the machine's `build_s`.
        progress: called with a short line for each step.

    Raises:
        EnvironmentFault: the Dockerfile has an error, one of its commands failed, or the build took too long.
        SandboxError: an image cannot be pulled, or the store cannot be written.
    """
    builder = node.dockerfiles()
    context = _context(files, machine)
    if _dockerfile(machine) not in context:
        raise EnvironmentFault(f"{dockerfile_of(machine)}: missing", hint="and the task names no image")
    name = image_name(files, machine, builder.puller.settings.bases)
    found = await in_thread(builder.store.image, name)
    if found is None:
        seconds = machine.build_s * timeout_factor
        found = await _build(builder, context, name, machine, seconds, progress)
    return TaskImage(path=found, image=await in_thread(read_layered, found))


def _context(files: Files, machine: Machine) -> dict[str, tuple[bytes, bool]]:
    if machine.image:
        return {"Dockerfile": (f"FROM {machine.image}\n".encode(), False)}
    hidden = _HIDDEN if machine.folder == "." else frozenset()
    found = paths_below(files, machine.folder)
    return {path: content_of(files[source]) for path, source in found.items() if path not in hidden}


def _dockerfile(machine: Machine) -> str:
    """Return the path of the Dockerfile in the context."""
    path = dockerfile_of(machine)
    return (
        "Dockerfile"
        if machine.image
        else path
        if machine.folder == "."
        else path.removeprefix(f"{machine.folder}/")
    )


def image_name(files: Files, machine: Machine, bases: Mapping[str, Path]) -> str:
    """Return the name in the store of a machine's image built with these local images by reference."""
    context = _context(files, machine)
    data, _ = context.get(_dockerfile(machine), (b"", False))
    base = re.search(rb"^\s*FROM\s+(?:--\S+\s+)*(\S+)", data, re.MULTILINE | re.IGNORECASE)
    label = "" if base is None else base[1].decode(errors="replace").lower().rpartition("/")[2]
    content = {path: [data.hex(), executable] for path, (data, executable) in sorted(context.items())}
    values = {"content": content, "bases": {name: place_of(bases[name]) for name in sorted(bases)}}
    if machine.dockerfile or machine.build_args or machine.build_target:
        build = [_dockerfile(machine), dict(sorted(machine.build_args.items())), machine.build_target]
        values["build"] = build
    key = of_value(values)
    return f"task-{_NOT_IN_NAMES.sub('-', label)[:40].strip('.-_') or 'image'}-{key[:32]}"


def write_files(folder: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    """Write files below a new folder of this machine.

    Args:
        folder: the folder, which is created.
        files: content and executability by relative path.

    Raises:
        OSError: a file cannot be written; for instance, another file has the path of its folder.
    """
    folder.mkdir(mode=0o755)
    for path, (data, executable) in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if executable else 0o644)


async def _build(
    builder: DockerfileBuilder,
    context: Mapping[str, tuple[bytes, bool]],
    name: str,
    machine: Machine,
    seconds: float,
    progress: Callable[[str], None],
) -> Path:
    scratch = await in_thread(make_scratch, builder.scratch)
    try:
        folder = scratch / "context"
        await in_thread(_write, folder, context)
        async with asyncio.timeout(seconds):
            return await builder.build(
                folder,
                folder / _dockerfile(machine),
                target=machine.build_target or None,
                args=machine.build_args,
                name=name,
                on_progress=lambda event: _report(event, progress),
            )
    except (InputError, RunFailed) as error:
        shown = "" if machine.folder == "." else f"{machine.folder}/"
        message = str(error.message).replace(f"{folder}/", shown)
        raise EnvironmentFault(f"the image cannot be built: {message}", hint=error.hint) from error
    except TimeoutError:
        raise EnvironmentFault(
            f"the image was not built in {seconds:g} s",
            hint="`prorl-envs prepare` builds images in advance; options.timeout_factor allows more time",
        ) from None
    finally:
        await in_thread(remove_tree, scratch)


def _write(folder: Path, context: Mapping[str, tuple[bytes, bool]]) -> None:
    try:
        write_files(folder, context)
    except OSError as error:
        raise EnvironmentFault(f"the task's files cannot be written: {error.strerror}") from error


def _report(event: BuildProgress, progress: Callable[[str], None]) -> None:
    if event.kind == "step":
        progress(f"[{event.step}/{event.steps}] {' '.join(event.text.split())[:100]}")
