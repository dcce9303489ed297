"""`prorl-envs image`: building, pulling and managing images of sandboxes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from prorl_envs.cli.options import ConfigOption, JsonOption, settings_of
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.errors import InputError, SandboxError, expand_user
from prorl_envs.images.modes import ImageMode

if TYPE_CHECKING:
    from prorl_envs.config import Settings
    from prorl_envs.images.builder import ImageBuilder
    from prorl_envs.images.layers import LayerStore
    from prorl_envs.images.store import ImageStore
    from prorl_envs.images.template import ImageTemplate

image = typer.Typer(help="Build, pull, list and remove images.", no_args_is_help=True)

_GIB = 1 << 30
#: Seconds between lines of progress.
_LINE_S = 5.0


ModeOption = Annotated[
    ImageMode,
    typer.Option("--mode", help="Build again, or reuse an image by the template's version or content."),
]


def _store(config: Path | None) -> "ImageStore":
    from prorl_envs.app.compose import image_store

    return image_store(settings_of(config))


@contextmanager
def _builder(config: Path | None) -> "Iterator[ImageBuilder]":
    from prorl_envs.app.compose import image_builder

    settings = settings_of(config)
    driver, next_s = _driver(settings), 0.0

    def print_line(line: str) -> None:
        nonlocal next_s
        if line and time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_S
            err.print(plain(line))

    if not err.is_terminal:
        yield image_builder(settings, print_line, driver=driver)
        return
    with err.status("starting") as status:
        yield image_builder(settings, lambda line: status.update(plain(line)), driver=driver)


def _driver(settings: "Settings") -> str:
    """Return the name of the driver that will use the images, or "": a machine without a working driver can
    build images for other machines."""
    from prorl_envs.app.compose import driver_name

    with suppress(SandboxError):
        return driver_name(settings)
    return ""


def _layers(config: Path | None) -> "LayerStore":
    from prorl_envs.app.compose import layer_store

    return layer_store(settings_of(config))


def _resolve(config: Path | None, source: "str | ImageTemplate", mode: ImageMode) -> None:
    from prorl_envs.cli.run_loop import run

    with _builder(config) as builder:
        found = run(builder.resolve(source, mode))
    out.print(str(found) if found is not None else "the host's own system needs no image", soft_wrap=True)


@image.command()
def build(
    source: Annotated[
        str,
        typer.Argument(
            help="A Dockerfile, or its directory; or a definition (.def), a tar, or an OCI or Docker archive."
        ),
    ] = ".",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The Dockerfile, if it is not in the directory.")
    ] = None,
    tag: Annotated[str, typer.Option("--tag", "-t", help="Name of a Dockerfile's image in the store.")] = "",
    target: Annotated[str, typer.Option(help="The Dockerfile's stage to build; by default the last.")] = "",
    build_args: Annotated[
        list[str] | None, typer.Option("--build-arg", help="NAME=VALUE for ARG instructions.")
    ] = None,
    secrets: Annotated[
        list[str] | None, typer.Option("--secret", help="ID=FILE for RUN --mount=type=secret.")
    ] = None,
    bases: Annotated[
        list[str] | None,
        typer.Option("--base", help="REFERENCE=PATH: a local image, used instead of a registry's image."),
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A host that the build can reach.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the image; by default the definition's.")] = "",
    version: Annotated[str, typer.Option(help="Version of the image, for --mode version.")] = "1",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE for {{ NAME }} in the definition.")
    ] = None,
    mode: ModeOption = ImageMode.LOCK,
    config: ConfigOption = None,
) -> None:
    """Build an image unless the cache has it, and print its path.

    The layers of a Dockerfile are stored in the store of layers. Other sources become a SIF file, which needs
    Apptainer.
    """
    path = expand_user(source)
    if file is None and path.name.lower().startswith("dockerfile") and path.is_file():
        path, file = path.parent, path
    if file is not None or (path / "Dockerfile").is_file():
        from prorl_envs.cli.commands.dockerfile_build import build_dockerfile
        from prorl_envs.cli.run_loop import run

        work = build_dockerfile(
            settings_of(config),
            path,
            file=file,
            tag=tag,
            target=target or None,
            args=_pairs("--build-arg", build_args),
            secrets=_paths("--secret", secrets),
            bases=_paths("--base", bases),
            allow=allow or [],
        )
        out.print(str(run(work)), soft_wrap=True)
        return
    if tag or target or build_args or secrets or bases or allow:
        raise InputError(
            f"{source} has no Dockerfile", hint="name a directory with a Dockerfile, or use --file"
        )
    _build_sif(config, source, name, version, _pairs("--set", values), mode)


def _build_sif(
    config: Path | None, source: str, name: str, version: str, variables: dict[str, str], mode: ImageMode
) -> None:
    from prorl_envs.images.template import ImageTemplate

    path = expand_user(source)
    image_source: str | ImageTemplate = source
    if path.suffix == ".def":
        image_source = ImageTemplate.read(path, name=name, version=version, variables=variables)
    elif variables or name:
        raise InputError("--name and --set are for definitions", hint="the name of a definition ends in .def")
    _resolve(config, image_source, mode)


def _pairs(option: str, values: list[str] | None) -> dict[str, str]:
    """Parse texts of the form NAME=VALUE, in which NAME has no `=`."""
    found = {}
    for value in values or []:
        key, equals, text = value.partition("=")
        if not equals:
            raise InputError(f"{option} {value}: NAME=VALUE is expected")
        found[key] = text
    return found


def _paths(option: str, values: list[str] | None) -> dict[str, Path]:
    return {key: expand_user(text) for key, text in _pairs(option, values).items()}


@image.command()
def pull(
    address: Annotated[str, typer.Argument(help="docker://..., oras://... or library://...")],
    refresh: Annotated[bool, typer.Option("--refresh", help="Pull again, even if the cache has it.")] = False,
    config: ConfigOption = None,
) -> None:
    """Pull an image unless the cache has it, and print its path.

    Images of docker:// become layers, without Apptainer, if the sandboxes' driver supports layers.
    """
    if "://" not in address:
        raise InputError(f"not an address: {address}", hint="such as docker://python:3.12-slim")
    _resolve(config, address, ImageMode.REBUILD if refresh else ImageMode.LOCK)


@image.command("list")
def list_images(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the images in the cache, the oldest first."""
    store, layered = _store(config), _layers(config).images()
    if as_json:
        from msgspec.structs import asdict

        found = [asdict(entry) for entry in store.entries()]
        print_json(found + [{"id": path.name, "path": str(path)} for path in layered])
        return
    table = Table("image", "version", "MiB", "made of", box=None)
    for entry in store.entries():
        table.add_row(entry.id, entry.version, f"{entry.size / (1 << 20):.1f}", plain(entry.source))
    for path in layered:
        table.add_row(path.name, "", "", plain(str(path)))
    out.print(table)
    err.print(f"in {store.root}")


@image.command()
def inspect(
    source: Annotated[str, typer.Argument(help="An image of the cache, or the path of a SIF.")],
    config: ConfigOption = None,
) -> None:
    """Show how an image was built, as JSON."""
    from prorl_envs.images.inspect import inspect

    out.print(plain(inspect(_store(config), source)), soft_wrap=True)


@image.command()
def prune(
    keep_gib: Annotated[
        float, typer.Option(min=0, help="Maximum size of all SIF files, and of all layers, in GiB.")
    ],
    unused_days: Annotated[
        float, typer.Option(min=0, help="Keep images that were used in this many last days.")
    ] = 1.0,
    config: ConfigOption = None,
) -> None:
    """Remove the least recently used images, and files that killed builds left in the cache."""
    removed = _store(config).prune(int(keep_gib * _GIB), unused_s=unused_days * 86_400)
    for entry in removed:
        out.print(entry.id)
    err.print(f"{len(removed)} removed, {sum(entry.size for entry in removed) >> 20} MiB")
    layers = _layers(config).evict(max_bytes=int(keep_gib * _GIB), unused_s=unused_days * 86_400)
    err.print(f"{len(layers)} layers removed")
