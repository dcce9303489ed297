"""Builder that turns an image source into a local path for `SandboxSpec.image`."""

import os
import platform
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prorl_envs.errors import InputError, SandboxError, expand_user
from prorl_envs.images import digest
from prorl_envs.images.apptainer import failure, rights
from prorl_envs.images.archive import write_layout
from prorl_envs.images.definition import BuildStage, render
from prorl_envs.images.lock import key_lock
from prorl_envs.images.modes import ImageMode
from prorl_envs.images.scratch import make_scratch
from prorl_envs.images.sources import REMOTE_SCHEMES, Source, SourceKind, parse_source
from prorl_envs.images.store import ImageStore, StoredImage
from prorl_envs.images.supervised import BuildLimits, BuildOutcome, environment, run_supervised
from prorl_envs.images.supervisor import remove
from prorl_envs.images.template import ImageTemplate
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer
from prorl_envs.sandbox.filesystem.directories import node_local_base
from prorl_envs.sandbox.filesystem.sif import system_partition

if TYPE_CHECKING:
    from prorl_envs.images.registry.puller import ImagePuller

_FORMAT = 1
_LOCAL = {"localimage", *SourceKind} - {
    SourceKind.HOST,
    SourceKind.REMOTE,
    SourceKind.SIF,
    SourceKind.DIRECTORY,
    SourceKind.TAR,
}


@dataclass(frozen=True, slots=True)
class _LockedTemplate:
    """Template whose components are all identified by content."""

    template: ImageTemplate
    stages: list[BuildStage]
    files: Mapping[str, Path]
    bases: Mapping[int, Path]
    content: dict[str, object]
    key: str


class ImageBuilder:
    """Builds images into a store: each once for all concurrent requests, even of several nodes.

    Args:
        store: store of the images.
        scratch: directory on a local disk to build in; None takes `node_local_base()`.
        limits: limits of one build.
        progress: called with a short line for each step.
        puller: pulls `docker://` addresses as layered images; with None, Apptainer converts them to SIF.
    """

    def __init__(
        self,
        store: ImageStore,
        *,
        scratch: Path | None = None,
        limits: BuildLimits | None = None,
        progress: Callable[[str], None] = lambda line: None,
        environ: Mapping[str, str] | None = None,
        puller: "ImagePuller | None" = None,
    ) -> None:
        self.store = store
        self._puller = puller
        self._scratch_base = node_local_base(scratch)
        self._limits = limits or BuildLimits()
        self._progress = progress
        self._environ = os.environ if environ is None else environ

    async def resolve(
        self, source: Source | ImageTemplate | str | Path | None, mode: ImageMode = ImageMode.LOCK
    ) -> Path | None:
        """Return the directory, SIF or layered image of `source`; build or pull it if it is missing.

        Args:
            source: the source; `parse_source` parses text and paths.
            mode: for a remote address, LOCK and VERSION both reuse an earlier pull.

        Returns:
            A path whose content never changes, or None for the host's own system.

        Raises:
            InputError: the source is invalid.
            SandboxError: this machine cannot build or pull it.
        """
        if isinstance(source, ImageTemplate):
            return await in_thread(self.store.use, await self._template(source, mode))
        if not isinstance(source, Source):
            source = await in_thread(parse_source, source)
        if self._puller is not None and source.location.startswith("docker://"):
            return await self._puller.resolve(source.location, refresh=mode is ImageMode.REBUILD)
        return await self._without_layers(source, mode)

    async def _without_layers(self, source: Source, mode: ImageMode) -> Path | None:
        """Return the directory or SIF of a source. Apptainer can use either as base of a build."""
        match source.kind:
            case SourceKind.HOST:
                return None
            case SourceKind.DIRECTORY:
                return source.path
            case SourceKind.SIF:
                await in_thread(system_partition, source.path)
                return source.path
            case _:
                return await in_thread(self.store.use, await self._converted(source, mode))

    async def _converted(self, source: Source, mode: ImageMode) -> StoredImage:
        """Return the image of an archive, a layout or an address."""
        content: dict[str, object] = {"format": _FORMAT, "kind": source.kind}
        if source.kind is SourceKind.REMOTE:
            content |= {"address": source.location, "architecture": platform.machine()}
        else:
            self._progress(f"reading {source.location}")
            content["sha256"] = await in_thread(digest.of_path, source.path)
        key = digest.of_value(content)
        async with self._single_builder(key, mode) as found:
            if found is not None:
                return found
            async with self._scratch() as scratch:
                image = scratch / "image.sif"
                if source.kind is SourceKind.REMOTE:
                    await self._pull(scratch, source.location, image)
                else:
                    await self._convert(scratch, source, image)
                return await self._add(image, key, source.name, "", source.location, content)

    async def _template(self, template: ImageTemplate, mode: ImageMode) -> StoredImage:
        if mode is not ImageMode.VERSION:
            return await self._locked_template(template, mode)
        name = digest.of_value({"name": template.name, "version": template.version})
        if found := await in_thread(self.store.find_version, template.name, template.version):
            return found
        path = await in_thread(self.store.lock_path, f"v{name}")
        async with key_lock(path, on_wait=self._waiting):
            if found := await in_thread(self.store.find_version, template.name, template.version):
                return found
            return await self._locked_template(template, ImageMode.LOCK)

    async def _locked_template(self, template: ImageTemplate, mode: ImageMode) -> StoredImage:
        locked = await self._lock(template, mode)
        async with self._single_builder(locked.key, mode) as found:
            if found is not None:
                return found
            async with self._scratch() as scratch:
                image = await self._build(scratch, locked)
                source = f"template {template.name} {template.version}"
                return await self._add(
                    image, locked.key, template.name, template.version, source, locked.content
                )

    async def _lock(self, template: ImageTemplate, mode: ImageMode) -> _LockedTemplate:
        """Identify all components of a template's image; pull missing ones."""
        stages = template.stages()
        files = await in_thread(template.copied, stages)
        content: dict[str, object] = {"format": _FORMAT, "kind": "template", "name": template.name}
        content |= {"version": template.version, "architecture": platform.machine()}
        bases, digests = {}, {}
        for number, stage in enumerate(stages):
            base = await in_thread(_base, template, stage)
            if base is not None:
                path = await self._without_layers(base, mode)
                assert path is not None
                bases[number] = path
                digests[str(number)] = await in_thread(self._digest, path)
                stage.header |= {"bootstrap": "localimage", "from": f"base-{number}"}
        content |= {"definition": render(stages), "bases": digests}
        content["files"] = {target: await in_thread(digest.of_path, path) for target, path in files.items()}
        return _LockedTemplate(template, stages, files, bases, content, digest.of_value(content))

    def _digest(self, image: Path) -> str:
        for entry in self.store.entries():
            if self.store.image(entry) == image:
                return entry.digest
        return digest.of_path(image)

    @asynccontextmanager
    async def _single_builder(self, key: str, mode: ImageMode) -> AsyncIterator[StoredImage | None]:
        """Yield the image of this key, or None to the single caller that must build it now."""
        if mode is not ImageMode.REBUILD and (found := await in_thread(self.store.find, key)):
            yield found
            return
        path = await in_thread(self.store.lock_path, key)
        async with key_lock(path, on_wait=self._waiting):
            yield None if mode is ImageMode.REBUILD else await in_thread(self.store.find, key)

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        scratch = await in_thread(make_scratch, self._scratch_base)
        try:
            yield scratch
        finally:
            await in_thread(remove, scratch)

    async def _build(self, scratch: Path, locked: _LockedTemplate) -> Path:
        image, definition = scratch / "image.sif", scratch / "definition"
        stages, may = locked.stages, await in_thread(rights)
        for number, path in locked.bases.items():
            base = scratch / f"base-{number}"
            if may.unpack_base:
                await self._apptainer(scratch, "--sandbox", str(base), str(path))
            else:
                base.symlink_to(path)
            stages[number].header["from"] = str(base)
        copies = await in_thread(_stage_files, scratch, locked)
        if copies:
            stages[-1].add("files", copies)
        labels = {"template": locked.template.name, "version": locked.template.version, "lock": locked.key}
        stages[-1].add("labels", [f"    prorl.{name} {value}" for name, value in labels.items()])
        definition.write_text(render(stages), encoding="utf-8")
        arguments = (str(image), str(definition))
        try:
            await self._apptainer(scratch, *arguments, identity=may.identity)
        except SandboxError as error:
            # The host's `fakeroot` program runs only in images with a C library like the host's.
            if "--ignore-fakeroot-command" not in error.message:
                raise
            await self._apptainer(scratch, "--ignore-fakeroot-command", *arguments)
        return image

    async def _convert(self, scratch: Path, source: Source, image: Path) -> None:
        # A colon in a path would start a tag, so the builder gets a link with a plain name.
        plain = scratch / "source"
        if source.kind is SourceKind.TAR:
            kind = SourceKind.OCI_LAYOUT
            await in_thread(write_layout, source.path, plain, limit=self._limits.unpacked_bytes)
        else:
            kind = source.kind
            plain.symlink_to(source.path)
        await self._apptainer(scratch, str(image), f"{kind}:{plain}")

    async def _apptainer(self, scratch: Path, *arguments: str, identity: bool = False) -> None:
        program = find_apptainer(environ=self._environ)
        command = [str(program), "build", *arguments]
        outcome = await self._run(scratch, command, identity=identity, remote=False)
        if outcome.status:
            raise failure(f"{program.name} build", outcome.status, outcome.output, remote=False)

    async def _pull(self, scratch: Path, address: str, image: Path) -> None:
        program = str(find_apptainer(environ=self._environ))
        command = [sys.executable, "-I", "-m", "prorl_envs.images.pull", program, address, str(image)]
        outcome = await self._run(scratch, command, identity=False, remote=True)
        if outcome.status or not await in_thread(image.is_file):
            raise failure(f"pulling {address}", outcome.status, outcome.output, remote=True)

    async def _run(self, scratch: Path, command: list[str], *, identity: bool, remote: bool) -> BuildOutcome:
        return await run_supervised(
            command,
            scratch=scratch,
            env=environment(scratch, self._environ, remote=remote),
            identity=identity,
            limits=self._limits,
            progress=self._progress,
        )

    async def _add(
        self, image: Path, key: str, name: str, version: str, source: str, content: dict[str, object]
    ) -> StoredImage:
        await in_thread(system_partition, image)
        self._progress("putting the image into the cache")
        return await in_thread(
            self.store.add, image, key=key, name=name, version=version, source=source, content=content
        )

    def _waiting(self) -> None:
        self._progress("waiting for another process, which builds the same image")


def _base(template: ImageTemplate, stage: BuildStage) -> Source | None:
    """Return the base image of a stage; None if it starts from scratch or with a package manager."""
    bootstrap, origin = stage.header.get("bootstrap", "").lower(), stage.header.get("from", "")
    if bootstrap in REMOTE_SCHEMES:
        parts = [stage.header.pop(key, "").strip("/") for key in ("registry", "namespace")]
        return parse_source(f"{bootstrap}://{'/'.join([*filter(None, parts), origin])}")
    if bootstrap in _LOCAL:
        if not origin:
            raise InputError(f"Bootstrap: {bootstrap} needs a From: line")
        path = template.folder.absolute() / expand_user(origin)
        return parse_source(path if bootstrap == "localimage" else f"{bootstrap}:{path}")
    return None


def _stage_files(scratch: Path, locked: _LockedTemplate) -> list[str]:
    """Copy the files for the image beside the definition, under names that are plain for Apptainer.

    Raises:
        InputError: a file changed after its content was read.
    """
    lines = []
    files = locked.content["files"]
    assert isinstance(files, dict)
    for number, (target, source) in enumerate(sorted(locked.files.items())):
        copy = scratch / f"file-{number}"
        try:
            if source.is_dir():
                shutil.copytree(source, copy, symlinks=True)
            else:
                shutil.copy(source, copy)
        except OSError as error:
            raise InputError(f"cannot copy {source} for the image: {str(error)[:500]}") from error
        if digest.of_path(copy) != files[target]:
            raise InputError(f"{source} changed during the build", hint="build again without changes to it")
        lines.append(f"    {copy} {target}")
    return lines
