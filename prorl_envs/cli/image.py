"""`prorl-envs image`: build, pull and look after the images of sandboxes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from prorl_envs.cli.console import err, out, plain
from prorl_envs.errors import InputError
from prorl_envs.images.modes import Mode

if TYPE_CHECKING:
    from prorl_envs.images.builder import ImageBuilder
    from prorl_envs.images.store import ImageStore
    from prorl_envs.images.template import ImageTemplate

image = typer.Typer(help="Build, pull and look after images.", no_args_is_help=True)

_GIB = 1 << 30
#: Seconds between lines of progress.
_LINE_S = 5.0


ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
ModeOption = Annotated[
    Mode,
    typer.Option("--mode", help="Build again, or reuse by the template's version or by its content."),
]


def _store(config: Path | None) -> "ImageStore":
    from prorl_envs.cli.compose import image_store
    from prorl_envs.config import load_settings

    return image_store(load_settings(config, os.environ))


@contextmanager
def _builder(config: Path | None) -> "Iterator[ImageBuilder]":
    from prorl_envs.cli.compose import image_builder
    from prorl_envs.config import load_settings

    settings = load_settings(config, os.environ)
    if not err.is_terminal:
        yield image_builder(settings, _Lines())
        return
    with err.status("starting") as status:
        yield image_builder(settings, lambda line: status.update(plain(line)))


class _Lines:
    """Progress where nobody watches a terminal: a line now and then."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now >= self._next and line:
            self._next = now + _LINE_S
            err.print(plain(line))


def _resolve(config: Path | None, source: "str | ImageTemplate", mode: Mode) -> None:
    from prorl_envs.cli.running import run

    with _builder(config) as builder:
        found = run(builder.resolve(source, mode))
    out.print(str(found) if found is not None else "the host's own system needs no image", soft_wrap=True)


@image.command()
def build(
    source: Annotated[
        str, typer.Argument(help="A definition (.def), a Dockerfile, a tar, or an OCI or Docker archive.")
    ],
    name: Annotated[str, typer.Option(help="Name of the image; by default the definition's.")] = "",
    version: Annotated[str, typer.Option(help="Version of the image, for --mode version.")] = "1",
    values: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE for {{ NAME }} in the definition.")
    ] = None,
    mode: ModeOption = Mode.LOCK,
    config: ConfigOption = None,
) -> None:
    """Build an image unless it is there, and print its path."""
    from prorl_envs.images.template import ImageTemplate

    path = Path(source).expanduser()
    variables = {}
    for value in values or []:
        key, equals, text = value.partition("=")
        if not equals:
            raise InputError(f"--set {value}: NAME=VALUE is expected")
        variables[key] = text
    made: str | ImageTemplate = source
    if path.suffix == ".def" or path.name.lower().startswith("dockerfile"):
        made = ImageTemplate.read(path, name=name, version=version, variables=variables)
    elif variables or name:
        raise InputError("--name and --set are for definitions", hint="name the file something.def")
    _resolve(config, made, mode)


@image.command()
def pull(
    address: Annotated[str, typer.Argument(help="docker://..., oras://... or library://...")],
    refresh: Annotated[bool, typer.Option("--refresh", help="Pull though it was pulled before.")] = False,
    config: ConfigOption = None,
) -> None:
    """Pull an image unless it is there, and print its path."""

    if "://" not in address:
        raise InputError(f"not an address: {address}", hint="such as docker://python:3.12-slim")
    _resolve(config, address, Mode.REBUILD if refresh else Mode.LOCK)


@image.command("list")
def list_images(config: ConfigOption = None) -> None:
    """List the images in the cache, the oldest first."""
    store = _store(config)
    table = Table("image", "version", "MiB", "made of", box=None)
    for entry in store.entries():
        table.add_row(entry.id, entry.version, f"{entry.size / (1 << 20):.1f}", plain(entry.source))
    out.print(table)
    err.print(f"in {store.root}")


@image.command()
def inspect(
    source: Annotated[str, typer.Argument(help="An image of the cache, or the path of a SIF.")],
    config: ConfigOption = None,
) -> None:
    """Show what an image was made of, as JSON."""
    from prorl_envs.images.inspect import inspect

    out.print(plain(inspect(_store(config), source)), soft_wrap=True)


@image.command()
def prune(
    keep_gib: Annotated[float, typer.Option(min=0, help="What the images may take together.")],
    unused_days: Annotated[float, typer.Option(min=0, help="Keep what was used in the last days.")] = 1.0,
    config: ConfigOption = None,
) -> None:
    """Remove the images unused for longest, and what killed builds left in the cache."""
    removed = _store(config).prune(int(keep_gib * _GIB), unused_s=unused_days * 86_400)
    for entry in removed:
        out.print(entry.id)
    err.print(f"{len(removed)} removed, {sum(entry.size for entry in removed) >> 20} MiB")
