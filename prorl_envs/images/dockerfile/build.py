"""Builder of Dockerfiles: each layer is created once, and shared through the store."""

import codecs
import contextlib
import os
import posixpath
import re
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from prorl_envs.errors import InputError, SandboxError
from prorl_envs.images.digest import of_value
from prorl_envs.images.dockerfile.add_files import (
    address_name,
    download,
    is_address,
    is_archive,
    unpack_archive,
)
from prorl_envs.images.dockerfile.copy_files import (
    CopyLimits,
    CopyRequest,
    FileCopier,
    LayerWriter,
    SourceTree,
    change_mode,
)
from prorl_envs.images.dockerfile.ignore import IgnoreRules
from prorl_envs.images.dockerfile.mounts import mount_options
from prorl_envs.images.dockerfile.parser import (
    Dockerfile,
    DockerfileError,
    Instruction,
    heredoc_name,
    read_dockerfile,
)
from prorl_envs.images.dockerfile.run import CommandRequest, RunFailed, last_lines, run_command
from prorl_envs.images.dockerfile.stage_settings import PROXY_ARGS, StageSettings
from prorl_envs.images.dockerfile.stages import (
    BuildPlan,
    StagePlan,
    declared_names,
    plan_build,
    platform_args,
    stage_index,
)
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.documents import host_platform
from prorl_envs.images.registry.puller import ImagePuller
from prorl_envs.images.scratch import make_scratch
from prorl_envs.images.threads import in_thread
from prorl_envs.images.unpack import UnpackLimits
from prorl_envs.sandbox.base import Driver, Mount, Network, SandboxLimits
from prorl_envs.sandbox.filesystem.directories import node_local_base, remove_tree
from prorl_envs.sandbox.filesystem.layer_leases import LAYERS
from prorl_envs.sandbox.filesystem.layered import LAYER_LIMIT, ImageConfig, LayeredImage, LayerTree

#: Part of the keys of layers: raise it if instructions are executed differently.
_FORMAT = 2
#: Lines of a failed command's output in its error.
_ERROR_LINES = 40
_IGNORE_LIMIT = 1 << 20
#: Most bytes of one download, which is stored in memory.
_DOWNLOAD_LIMIT = 1 << 30
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerfileLimits:
    """Limits of one build.

    Args:
        run_s: most seconds of one RUN or one download.
        output_bytes: most bytes of a command's output; the rest is dropped.
        copy: limits of one COPY or ADD.
        sandbox: limits of the sandbox of a RUN; None uses the driver's.
    """

    run_s: float = 3600.0
    output_bytes: int = 1 << 20
    copy: CopyLimits = field(default_factory=CopyLimits)
    sandbox: SandboxLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProgress:
    """Event of a build.

    Args:
        kind: `step`: an instruction starts; `shared`: its layer exists already; `made`: its layer was
            created; `output`: output of a command; `note`: other information.
        step: number of the instruction, from 1.
        steps: number of instructions in all stages that are built.
        line: line of the instruction in the Dockerfile.
        text: the instruction, the output, or the note. Untrusted.
        seconds: duration, for `shared` and `made`.
    """

    kind: Literal["step", "shared", "made", "output", "note"]
    step: int = 0
    steps: int = 0
    line: int = 0
    text: str = ""
    seconds: float = 0.0


type OnProgress = Callable[[BuildProgress], None]


@dataclass(slots=True)
class _Stage:
    """State of a stage: its layers, the key of the last instruction, its settings, and its variables."""

    layers: list[Path]
    key: str
    config: ImageConfig
    variables: Mapping[str, str] = field(default_factory=dict)


class DockerfileBuilder:
    """Builds Dockerfiles.

    Args:
        store: store of the layers and images; builders that share it trust each other.
        driver: driver of the sandboxes of RUN: bubblewrap or apptainer.
        network: hosts that RUN and ADD can reach.
        limits: limits of one build.
        puller: pulls other images; None creates a puller for the store.
        scratch: directory on the file system of the driver's sandboxes; None uses `node_local_base()`.
    """

    def __init__(
        self,
        store: LayerStore,
        driver: Driver,
        *,
        network: Network | None = None,
        limits: DockerfileLimits | None = None,
        puller: ImagePuller | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.store, self.driver = store, driver
        self.network = network or Network()
        self.limits = limits or DockerfileLimits()
        self.puller = puller or ImagePuller(store)
        self.scratch = node_local_base(scratch)

    async def build(
        self,
        context: Path,
        dockerfile: Path | None = None,
        *,
        target: str | None = None,
        args: Mapping[str, str] | None = None,
        secrets: Mapping[str, Path] | None = None,
        name: str = "",
        on_progress: OnProgress = lambda event: None,
    ) -> Path:
        """Build an image, and return the path of its `.layers.json` file in the store.

        Layers in the store are not created again; concurrent builders of a layer wait for the first.

        Args:
            context: directory of the files for COPY and ADD. It must not change during the build.
            dockerfile: path of the Dockerfile; None uses `Dockerfile` in the context.
            target: name or number of the stage to build; None is the last stage.
            args: values for ARG instructions.
            secrets: files for `RUN --mount=type=secret`, by id. They are not part of the image or its keys.
            name: name of the image in the store; "" derives a name from its content.
            on_progress: called with each event.

        Raises:
            DockerfileError: the Dockerfile has an error, or a file for it is missing.
            RunFailed: a command failed.
            SandboxError: a base image cannot be pulled, a sandbox failed, or the store cannot be written.
        """
        parsed = await in_thread(read_dockerfile, dockerfile or context / "Dockerfile")
        plan = plan_build(parsed, args or {}, platform=host_platform(), target=target)
        rules = await in_thread(_read_ignore, context, dockerfile)
        run = _Build(self, plan, context, rules, args or {}, secrets or {}, on_progress)
        with run.leases:
            stage = await run.build()
            image = LayeredImage(layers=tuple(stage.layers), config=stage.config)
            return await in_thread(self.store.write_image, name or _image_name(plan, stage), image)


def _image_name(plan: BuildPlan, stage: _Stage) -> str:
    label = _NOT_IN_NAMES.sub("-", plan.stages[-1].base.rpartition("/")[2])[:48].strip(".-_") or "image"
    config = {name: getattr(stage.config, name) for name in ImageConfig.__dataclass_fields__}
    key = of_value({"format": _FORMAT, "key": stage.key, "config": config})
    return f"{label}-{key[:16]}"


def _read_ignore(context: Path, dockerfile: Path | None) -> IgnoreRules:
    """Read the ignore file: `NAME.dockerignore` beside the Dockerfile, else that of the context.

    Raises:
        DockerfileError: the context does not exist.
        InputError: the file is too large.
    """
    if not context.is_dir():
        raise DockerfileError("is not a directory", file=str(context))
    file = dockerfile or context / "Dockerfile"
    for path in (file.with_name(f"{file.name}.dockerignore"), context / ".dockerignore"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as opened:
                data = opened.read(_IGNORE_LIMIT + 1)
            if len(data) > _IGNORE_LIMIT:
                raise InputError(f"{path} has more than {_IGNORE_LIMIT} bytes")
            text = data.removeprefix(codecs.BOM_UTF8).decode(errors="surrogateescape")
            return IgnoreRules(text.split("\n"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DockerfileError(f"cannot be read: {error.strerror}", file=str(path)) from error
    return IgnoreRules(())


class _Build:
    """State of one build."""

    def __init__(
        self,
        builder: DockerfileBuilder,
        plan: BuildPlan,
        context: Path,
        rules: IgnoreRules,
        args: Mapping[str, str],
        secrets: Mapping[str, Path],
        on_progress: OnProgress,
    ) -> None:
        self._builder, self._plan, self._args, self._secrets = builder, plan, args, secrets
        self._context = SourceTree([context.absolute()], rules=rules)
        self._on_progress = on_progress
        self._stages: dict[int, _Stage] = {}
        self._images: dict[str, _Stage] = {}
        #: Leases of the layers, which a build holds to its end.
        self.leases = contextlib.ExitStack()
        self._step, self._steps = 0, sum(len(stage.steps) + 1 for stage in plan.stages)
        self._current_step: Instruction | None = None

    @property
    def _dockerfile(self) -> Dockerfile:
        return self._plan.dockerfile

    async def build(self) -> _Stage:
        for name in sorted(set(self._args) - PROXY_ARGS - declared_names(self._dockerfile)):
            self._report("note", text=f"the argument {name} is not used: no ARG declares it")
        for plan in self._plan.stages:
            self._stages[plan.index] = await self._build_stage(plan)
        return self._stages[self._plan.stages[-1].index]

    async def _build_stage(self, plan: StagePlan) -> _Stage:
        self._start_step(plan.origin)
        stage = await self._base(plan)
        inherited = {**platform_args(host_platform()), **self._plan.global_args}
        settings = StageSettings(self._dockerfile, stage.config, self._args, inherited, stage.variables)
        for step in plan.steps:
            self._start_step(step)
            with self._errors_at(step):
                settings.apply(step)
                await self._make(plan, stage, settings, step)
            if len(stage.layers) > LAYER_LIMIT:
                raise self._dockerfile.error(
                    step, f"the image has more than {LAYER_LIMIT} layers", "join RUN instructions with &&"
                )
        stage.config, stage.variables = settings.config, settings.variables
        return stage

    async def _base(self, plan: StagePlan) -> _Stage:
        if plan.parent is not None:
            parent = self._stages[plan.parent]
            return _Stage([*parent.layers], parent.key, parent.config, parent.variables)
        with self._errors_at(plan.origin):
            found = await self._image(plan.base, plan.platform)
        return _Stage([*found.layers], found.key, found.config)

    async def _image(self, reference: str, platform: str = "") -> _Stage:
        """Return the image of a reference: `scratch`, a base alias, or an image of a registry."""
        if (cached := self._images.get(f"{platform} {reference}")) is not None:
            return cached
        if reference == "scratch":
            found = _Stage([await self._layer("empty", _leave_empty)], "scratch", ImageConfig())
        else:
            if reference.startswith(("/", ".")):
                raise InputError(
                    f"{reference} is a path of this machine",
                    hint="define a name for it: --base NAME=PATH, or images.bases",
                )
            image = await self._builder.puller.pull(reference, platform=platform)
            self._hold(image.layers)
            key = of_value({"format": _FORMAT, "layers": [self._identity(layer) for layer in image.layers]})
            found = _Stage([*image.layers], key, image.config)
        self._images[f"{platform} {reference}"] = found
        return found

    def _identity(self, layer: Path) -> str:
        if layer.parent == self._builder.store.root / LAYERS:
            return layer.name
        return f"{layer} {layer.stat().st_mtime_ns}"

    async def _make(self, plan: StagePlan, stage: _Stage, settings: StageSettings, step: Instruction) -> None:
        match step.name:
            case "RUN":
                await self._make_run(plan, stage, settings, step)
            case "COPY" | "ADD":
                await self._make_copy(plan, stage, settings, step)
            case "WORKDIR":
                await self._make_workdir(stage, settings.workdir)

    async def _make_workdir(self, stage: _Stage, workdir: str) -> None:
        kind = await in_thread(LayerTree(stage.layers).kind, workdir)
        if kind == stat.S_IFDIR:
            return

        async def fill(place: Path) -> None:
            await in_thread(lambda: LayerWriter(stage.layers, place).make_directory(workdir))

        await self._add(stage, {"name": "WORKDIR", "path": workdir}, fill)

    async def _make_copy(
        self, plan: StagePlan, stage: _Stage, settings: StageSettings, step: Instruction
    ) -> None:
        source = await self._source(plan, step.flag("from"))
        with self._scratch() as scratch:
            request = await self._copy_request(step, settings, source, scratch)
            copier = FileCopier(source, request, self._builder.limits.copy)
            record = {
                "name": "COPY",
                "destination": request.destination,
                "sources": list(request.sources),
                "mode": request.mode,
                "parents": request.keeps_parents,
                "excluded": list(request.excluded),
                "unpacked": sorted(map(ascii, request.unpacked)),  # names may not be Unicode
                "documents": list(request.documents),
                "content": await in_thread(copier.digest),
            }

            async def fill(place: Path) -> None:
                for path, folder in request.unpacked.items():
                    await in_thread(self._unpack, source, path, folder)
                writer = LayerWriter(stage.layers, place)
                await in_thread(copier.copy, writer)

            await self._add(stage, record, fill)

    def _unpack(self, source: SourceTree, path: str, folder: Path) -> None:
        archive = source.file(path)
        if archive is None:
            raise InputError(f"{path} was replaced during the build")
        folder.mkdir(parents=True)
        limits = self._builder.limits.copy
        unpack_archive(
            archive, folder, UnpackLimits(unpacked_bytes=limits.size_bytes, entries=limits.entries)
        )

    async def _source(self, plan: StagePlan, name: str) -> SourceTree:
        """Return the files of the earlier stage or the image that `--from` names; "" is the context."""
        if not name:
            return self._context
        index = stage_index(name, self._plan.names, plan.index)
        found = await self._image(name) if index is None else self._stages[index]
        return SourceTree(found.layers, name=f"the stage or image {name}")

    async def _copy_request(
        self, step: Instruction, settings: StageSettings, source: SourceTree, scratch: Path
    ) -> CopyRequest:
        words = settings.words(step)
        if len(words) < 2:
            raise InputError("needs a source and a destination")
        *sources, destination = words
        documents = dict(self._documents(step, settings))
        sources = [source for source in sources if heredoc_name(source) not in documents]
        if step.name == "ADD":
            sources, downloads = await self._download(step, settings, sources, destination, scratch)
            documents |= downloads
        target = settings.path_inside(destination)
        if len(sources) + len(documents) > 1 and not target.endswith("/"):
            raise InputError(f"several sources need a directory, but {destination} has no / at its end")
        unpacked: dict[str, Path] = {}
        if step.name == "ADD" and step.flag("unpack", "true") != "false":
            unpacked = await in_thread(_archives, source, sources, scratch)
        mode = settings.expand(step, step.flag("chmod"))
        change_mode(mode, 0)  # raises an error for a mode that is wrong
        return CopyRequest(
            sources=sources,
            destination=target,
            documents=documents,
            mode=mode,
            keeps_parents=step.switch("parents") if step.name == "COPY" else False,
            excluded=[settings.expand(step, value) for name, value in step.flags if name == "exclude"],
            unpacked=unpacked,
        )

    def _documents(self, step: Instruction, settings: StageSettings) -> Iterator[tuple[str, bytes]]:
        for heredoc in step.heredocs:
            text = heredoc.content
            if heredoc.expands:
                text = settings.expand(step, text, keep_quotes=True)
            yield heredoc.name, text.encode()

    async def _download(
        self,
        step: Instruction,
        settings: StageSettings,
        sources: Sequence[str],
        destination: str,
        scratch: Path,
    ) -> tuple[list[str], dict[str, bytes]]:
        """Download the addresses among sources. Return the other sources, and the contents by file name."""
        limits = self._builder.limits
        found: dict[str, bytes] = {}
        for address in filter(is_address, sources):
            target = scratch / f"download{len(found)}"
            file = address_name(address)
            name = file if destination.endswith("/") else posixpath.basename(destination)
            await download(
                self._builder.network,
                address,
                target,
                limit=min(limits.copy.size_bytes, _DOWNLOAD_LIMIT),
                seconds=limits.run_s,
                checksum=settings.expand(step, step.flag("checksum")),
            )
            found[name] = target.read_bytes()
        return [source for source in sources if not is_address(source)], found

    async def _make_run(
        self, plan: StagePlan, stage: _Stage, settings: StageSettings, step: Instruction
    ) -> None:
        network = self._builder.network if step.flag("network", "default") != "none" else Network()
        if step.flag("security", "sandbox") != "sandbox":
            raise self._dockerfile.error(step, "--security=insecure is not supported")
        argv, stdin = self._command(step, settings)
        with self._scratch() as scratch:
            mounts, env, identity = await self._mounts(plan, settings, step, scratch)
            record = {
                "name": "RUN",
                "argv": list(argv),
                "stdin": stdin.decode(errors="surrogateescape"),
                "env": settings.variables,
                "workdir": settings.workdir,
                "mounts": identity,
                "network": network != Network(),
            }
            request = CommandRequest(
                argv=argv,
                layers=stage.layers,
                workdir=settings.workdir,
                stdin=stdin,
                env={**settings.proxy_environment, **settings.variables, **env},
                mounts=mounts,
                network=network,
                limits=self._builder.limits.sandbox,
                seconds=self._builder.limits.run_s,
                output_bytes=self._builder.limits.output_bytes,
            )

            async def fill(place: Path) -> None:
                await self._run(step, request, place, scratch)

            await self._add(stage, record, fill)

    async def _run(self, step: Instruction, request: CommandRequest, place: Path, scratch: Path) -> None:
        completed = await run_command(self._builder.driver, request, place, scratch)
        output = last_lines(completed.output, _ERROR_LINES)
        self._report("output", text=completed.output.decode(errors="replace"))
        if completed.exit_code == 0:
            return
        problem = (
            f"did not finish in {request.seconds:g} s"
            if completed.timed_out
            else f"failed with exit status {completed.exit_code}"
        )
        raise RunFailed(
            f"{self._dockerfile.file}:{step.line}: RUN {problem}: {step.text[:200]}\n{output}",
            hint=_run_hint(output, self._builder.network),
        )

    def _command(self, step: Instruction, settings: StageSettings) -> tuple[tuple[str, ...], bytes]:
        """Return the program and arguments of a RUN, and its standard input."""
        if step.items is not None:
            if not step.items:
                raise self._dockerfile.error(step, "needs a program")
            return step.items, b""
        if len(step.heredocs) == 1 and heredoc_name(step.text) is not None:
            # The document is the script; the shell replaces its variables.
            script = step.heredocs[0].content
            if script.startswith("#!"):
                return (*script[2:].partition("\n")[0].split(maxsplit=1), "/dev/stdin"), script.encode()
            return (*settings.shell, script), b""
        documents = "".join(f"\n{heredoc.raw}" for heredoc in step.heredocs)
        return (*settings.shell, step.text + documents), b""

    async def _mounts(
        self, plan: StagePlan, settings: StageSettings, step: Instruction, scratch: Path
    ) -> tuple[list[Mount], dict[str, str], list[dict[str, str]]]:
        """Return the mounts of a RUN, the variables of its secrets, and its mounts' part of the key."""
        mounts: list[Mount] = []
        env: dict[str, str] = {}
        identity: list[dict[str, str]] = []
        for number, options in enumerate(mount_options(self._dockerfile, step)):
            options = {key: settings.expand(step, value) for key, value in options.items()}
            if "target" in options:
                options["target"] = settings.path_inside(options["target"]).rstrip("/")
            identity.append(options)
            match options["type"]:
                case "secret":
                    self._add_secret(step, options, mounts, env)
                case "bind":
                    folder = scratch / f"bind{number}"
                    mount, content = await self._bind(plan, options, folder)
                    mounts.append(mount)
                    options["content"] = content
                case _:
                    # A cache is empty, because layers that builds share must not depend on its content.
                    folder = scratch / f"empty{number}"
                    folder.mkdir()
                    mounts.append(Mount(source=folder, target=options["target"], overlay=True))
        return mounts, env, identity

    def _add_secret(
        self, step: Instruction, options: Mapping[str, str], mounts: list[Mount], env: dict[str, str]
    ) -> None:
        path = self._secrets.get(options["id"])
        if path is None:
            if options.get("required", "false") == "true":
                raise self._dockerfile.error(
                    step, f"needs the secret {options['id']}", f"give it with --secret {options['id']}=FILE"
                )
            return
        if "env" in options:
            env[options["env"]] = path.read_text(encoding="utf-8").rstrip("\n")
        if "target" in options:
            mounts.append(Mount(source=path.absolute(), target=options["target"]))

    async def _bind(self, plan: StagePlan, options: Mapping[str, str], folder: Path) -> tuple[Mount, str]:
        source = await self._source(plan, options.get("from", ""))
        path = options.get("source", "").strip("/")
        request = CopyRequest(sources=[path or "."], destination="/copy")
        copier = FileCopier(source, request, self._builder.limits.copy)
        content = await in_thread(copier.digest)
        copied = await in_thread(_copy_to, copier, folder)
        return Mount(source=copied, target=options["target"], overlay=copied.is_dir()), content

    async def _add(
        self, stage: _Stage, record: Mapping[str, object], fill: Callable[[Path], Awaitable[None]]
    ) -> None:
        """Add the layer of an instruction to a stage, unless it is empty."""
        key = of_value({"format": _FORMAT, "parent": stage.key, **record})
        layer = await self._layer(key, fill)
        stage.key = key
        if not await in_thread(_is_empty, layer):
            stage.layers.append(layer)

    async def _layer(self, key: str, fill: Callable[[Path], Awaitable[None]]) -> Path:
        store, name = self._builder.store, f"df{_FORMAT}-{key}"
        started = time.monotonic()
        waiting = partial(self._report, "note", text="waiting for another build of the same layer")
        async with store.making(name, on_wait=waiting) as place:
            if place is not None:
                await fill(place)
        kind: Literal["shared", "made"] = "shared" if place is None else "made"
        layer = await in_thread(store.layer, name)
        if layer is None:
            raise SandboxError("a layer was evicted during the build", hint="raise the limit of the store")
        self._hold([layer])
        self._report(kind, seconds=time.monotonic() - started)
        return layer

    def _hold(self, layers: Sequence[Path]) -> None:
        self.leases.enter_context(self._builder.store.holding(layers))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        path = make_scratch(self._builder.scratch)
        try:
            yield path
        finally:
            remove_tree(path)

    @contextmanager
    def _errors_at(self, step: Instruction) -> Iterator[None]:
        """Add the instruction to errors about its arguments."""
        try:
            yield
        except DockerfileError:
            raise
        except InputError as error:
            raise self._dockerfile.error(step, error.message, error.hint) from error
        except OSError as error:
            raise self._dockerfile.error(step, str(error)) from error

    def _start_step(self, step: Instruction) -> None:
        self._step += 1
        self._current_step = step
        self._report("step", text=f"{step.name} {step.text}")

    def _report(
        self,
        kind: Literal["step", "shared", "made", "output", "note"],
        *,
        text: str = "",
        seconds: float = 0.0,
    ) -> None:
        line = self._current_step.line if self._current_step is not None else 0
        event = BuildProgress(
            kind=kind, step=self._step, steps=self._steps, line=line, text=text, seconds=seconds
        )
        self._on_progress(event)


def _copy_to(copier: FileCopier, folder: Path) -> Path:
    """Copy a request's files to a new directory; return the host path of its destination, `/copy`."""
    folder.mkdir()
    copier.copy(LayerWriter([], folder))
    return folder / "copy"


async def _leave_empty(place: Path) -> None:
    """Add no files to a layer."""


def _is_empty(layer: Path) -> bool:
    with os.scandir(layer) as entries:
        return next(entries, None) is None


def _archives(source: SourceTree, sources: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Return a directory in `scratch` for each source that is an archive."""
    paths = [path for pattern in sources for path in source.select(pattern)]
    files = {path: source.file(path) for path in paths}
    found = [path for path, file in files.items() if file is not None and is_archive(file)]
    return {path: scratch / "unpacked" / str(number) for number, path in enumerate(found)}


def _run_hint(output: str, network: Network) -> str:
    signs = ("Could not resolve", "Temporary failure", "Connection refused", "not on the allowlist", "403")
    if not network.open and "an address that is not public" in output:
        return "allow the name wherever it leads, with --allow private:HOST; a warning names its address"
    if not network.open and any(sign in output for sign in signs):
        return "only allowed hosts can be reached: add them with --allow, or in the settings"
    return ""
