"""Composition root: creates node, environments, renderer, model servers and service, and connects them."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from prorl_envs.catalog import entries
from prorl_envs.config import DEFAULT_STORE, LimitSettings, ModelSettings, ServiceSettings, Settings
from prorl_envs.env.node import Node, default_cache_dir
from prorl_envs.env.search import SearchSettings
from prorl_envs.errors import InputError
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.dockerfile.build import DockerfileBuilder, DockerfileLimits
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.client import RegistrySettings
from prorl_envs.images.registry.puller import ImagePuller, PullSettings
from prorl_envs.images.store import ImageStore
from prorl_envs.images.supervised import BuildLimits as BuildLimits
from prorl_envs.images.unpack import UnpackLimits
from prorl_envs.model.servers.detect import Protocol, Servers
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.episode.environments import Defaults
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.sandbox.base import Driver, Network, SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.select import LAYERED_DRIVERS, choose_driver, make_driver
from prorl_envs.sandbox.limits.enforcement import NodeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model behind the rollouts.

    Args:
        servers: base URLs of the model servers; if empty, turns wait until a server is added.
        renderer: tokenizer and chat template of the model.
        name: name of the model on the servers; None selects the first model that they list.
        api_key: bearer token of the servers.
        protocol: protocol of servers whose URL does not name one.
        tokenizer: folder or Hub name of the tokenizer, for other machines; "" if there is none.
        ca_file: PEM file with certificates of the trusted authorities; None means the public authorities.
    """

    servers: Sequence[str]
    renderer: TemplateRenderer
    name: str | None = None
    api_key: str | None = None
    protocol: Protocol = "auto"
    tokenizer: str = ""
    ca_file: Path | None = None


class EarlierModel(BaseModel):
    """Model of the last service that used a store, saved for restarts while no model server answers.

    Args:
        name: name of the model on the servers; "" if unknown.
        tokenizer: folder or Hub name of the tokenizer.
    """

    name: str = ""
    tokenizer: str = ""


#: Key of `EarlierModel` in the store.
_EARLIER = "model"


async def earlier_model(store: SqlStore | None) -> EarlierModel | None:
    """Return the model of a store's unfinished jobs; None if there are no unfinished jobs."""
    if store is None or not await store.unfinished():
        return None
    saved = await store.get_value(_EARLIER)
    return EarlierModel() if saved is None else EarlierModel.model_validate_json(saved)


async def keep_model(store: SqlStore | None, model: Model) -> None:
    """Save the model's name and tokenizer in the store for a restart."""
    if store is not None:
        earlier = EarlierModel(name=model.name or "", tokenizer=absolute_tokenizer(model.tokenizer))
        await store.put_value(_EARLIER, earlier.model_dump_json())


def absolute_tokenizer(tokenizer: str) -> str:
    """Return the absolute path of a tokenizer's folder, or its Hub name; "" if there is none."""
    folder = Path(tokenizer)
    return str(folder.resolve()) if tokenizer and folder.is_dir() else tokenizer


def servers_of(model: Model) -> Servers:
    """Return the connector for the servers of a model."""
    return Servers.of(
        model.renderer,
        protocol=model.protocol,
        model=model.name,
        api_key=model.api_key,
        ca_file=model.ca_file,
    )


@asynccontextmanager
async def node(settings: Settings) -> AsyncIterator[Node]:
    """Open the node that runs this machine's sandboxes, and start a test sandbox; close the node on exit.

    Raises:
        SandboxError: this machine cannot run sandboxes.
        InputError: the user has no home directory, so there is no cache directory.
    """
    cache_dir = settings.cache_dir or default_cache_dir()
    driver = await sandbox_driver(settings)
    images = functools.partial(image_builder, settings, driver=driver.name)
    search = search_of(settings)
    async with Node(
        driver,
        cache_dir,
        warm_pool_size=settings.sandbox.warm_pool_size,
        search=search,
        images=images,
        dockerfiles=functools.partial(dockerfiles_of, settings),
        limits=node_limits(settings.limits).per_sandbox,
        max_concurrent_starts=settings.sandbox.max_concurrent_starts,
    ) as opened:
        await (await opened.sandbox(SandboxSpec())).close()
        yield opened


def search_of(settings: Settings) -> SearchSettings:
    """Return the settings of the search backend."""
    search = settings.search
    key = search.key.get_secret_value() if search.key else ""
    return SearchSettings(
        backend=search.backend, corpus=search.corpus, url=search.url, key=key, timeout_s=search.timeout_s
    )


def driver_name(settings: Settings) -> str:
    """Return the name of the driver for the sandboxes of this machine. Tests drivers; blocks.

    Raises:
        SandboxError: no driver works on this machine.
    """
    return choose_driver(settings.driver, settings.run_dir, **_programs(settings))


async def sandbox_driver(settings: Settings) -> NodeDriver[Any]:
    """Return a new driver for the sandboxes of this machine; the caller closes it.

    Raises:
        SandboxError: no driver works on this machine.
    """
    name = await asyncio.to_thread(driver_name, settings)
    return make_driver(name, settings.run_dir, limits=node_limits(settings.limits), **_programs(settings))


def _programs(settings: Settings) -> dict[str, Path | None]:
    return {"bwrap": settings.bwrap, "apptainer": settings.apptainer}


def image_store(settings: Settings) -> ImageStore:
    """Return the store of images."""
    return ImageStore(settings.image_cache or (settings.cache_dir or default_cache_dir()) / "images")


def layer_store(settings: Settings) -> LayerStore:
    """Return the store of unpacked layers."""
    return LayerStore(settings.images.layers_dir or (settings.cache_dir or default_cache_dir()) / "layers")


def image_puller(
    settings: Settings, progress: Callable[[str], None], *, bases: Mapping[str, Path] | None = None
) -> ImagePuller:
    """Return the client that pulls images from registries into the store of layers.

    Args:
        settings: all settings.
        progress: called with a short line on each progress.
        bases: local images by reference, in addition to those of the settings.
    """
    registries = RegistrySettings(mirrors=settings.images.mirrors, insecure=settings.images.insecure)
    pulls = PullSettings(
        registry=registries,
        bases={**settings.images.bases, **(bases or {})},
        limits=UnpackLimits(unpacked_bytes=settings.image_build_bytes),
        seconds=settings.image_build_s,
    )
    return ImagePuller(layer_store(settings), pulls, progress=progress)


def image_builder(settings: Settings, progress: Callable[[str], None], *, driver: str = "") -> ImageBuilder:
    """Return a builder that writes images into the store.

    Args:
        settings: all settings.
        progress: called with a short line on each progress.
        driver: name of the sandboxes' driver; if it supports layers, `docker://` images are pulled as layers.
    """
    limits = BuildLimits(seconds=settings.image_build_s, unpacked_bytes=settings.image_build_bytes)
    puller = image_puller(settings, progress) if driver in LAYERED_DRIVERS else None
    return ImageBuilder(
        image_store(settings), scratch=settings.run_dir, limits=limits, progress=progress, puller=puller
    )


@asynccontextmanager
async def dockerfile_builder(
    settings: Settings, *, bases: Mapping[str, Path], allow: Sequence[str]
) -> AsyncIterator[DockerfileBuilder]:
    """Open a builder of Dockerfiles with the driver of its sandboxes; close the driver on exit.

    Args:
        settings: all settings.
        bases: local images by reference, in addition to those of the settings.
        allow: hosts that builds can reach, in addition to those of the settings.

    Raises:
        SandboxError: this machine cannot run sandboxes.
    """
    driver = await sandbox_driver(settings)
    try:
        yield dockerfiles_of(settings, driver, bases=bases, allow=allow)
    finally:
        await driver.aclose()


def dockerfiles_of(
    settings: Settings, driver: Driver, *, bases: Mapping[str, Path] | None = None, allow: Sequence[str] = ()
) -> DockerfileBuilder:
    """Return a builder of Dockerfiles.

    Args:
        settings: all settings.
        driver: driver of the build's sandboxes.
        bases, allow: as in `dockerfile_builder`.
    """
    puller = image_puller(settings, lambda line: None, bases=bases)
    return DockerfileBuilder(
        puller.store,
        driver,
        puller=puller,
        network=Network(allow=(*settings.images.allow, *allow)),
        limits=DockerfileLimits(run_s=settings.image_build_s),
        scratch=settings.run_dir,
    )


def node_limits(settings: LimitSettings) -> NodeLimits:
    """Convert the limit settings to the limits that a driver takes."""
    return NodeLimits.of(settings.model_dump())


def request_defaults(settings: Settings) -> dict[str, Defaults]:
    """Return the limits and the sampling that the configuration sets for each environment.

    Raises:
        InputError: a name is unknown, or its value is wrong.
    """
    return {
        entry.name: Defaults.of(entry.name, entry.settings.limits, entry.settings.sampling)
        for entry in entries(settings)
    }


def open_store(settings: ServiceSettings) -> SqlStore | None:
    """Open the store of jobs and results; return None for memory.

    Raises:
        InputError: the store cannot be opened, or another service uses it.
    """
    bounds = settings.retention.of_results
    if settings.store is None:
        return None
    if settings.store == DEFAULT_STORE:
        with contextlib.suppress(OSError):  # the store then reports that it cannot be opened
            settings.store.parent.mkdir(exist_ok=True)
    return SqliteStore(settings.store, **bounds)


async def connect(
    servers: Sequence[str],
    settings: ModelSettings,
    *,
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
    earlier: EarlierModel | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Model:
    """Probe the user's model servers, and load the model's tokenizer.

    Args:
        servers: base URLs of servers of one model.
        settings: protocol, tool format and CA file.
        tokenizer: folder or Hub name of the tokenizer; None means the model name of the first server.
        name: model name; None means the first model that the server lists.
        api_key: bearer token, if the servers need one.
        earlier: model of unfinished jobs, which wait if a server is unavailable.
        note: called with a line for each unavailable server.

    Raises:
        InputError: a server is unavailable and no job is unfinished, a server does not support token ids, the
            tokenizer cannot be loaded, or the CA file cannot be used.
    """
    protocol, ca_file = settings.protocol, settings.ca_file
    for url in servers:
        report = await probe(url, protocol=protocol, model=name, api_key=api_key, ca_file=ca_file)
        if not report.ok and (earlier is None or not report.unavailable):
            raise InputError(report.problem, hint=report.hint)
        if not report.ok:
            note(f"warning: {report.problem}; unfinished jobs wait for this server")
        name = name or report.model
    if earlier is not None:
        name, tokenizer = name or earlier.name or None, tokenizer or earlier.tokenizer or None
    if tokenizer is None and not name:
        raise InputError("the server lists no model", hint="set the tokenizer: --tokenizer FOLDER")
    tokenizer = tokenizer or str(name)
    return Model(
        servers=servers,
        renderer=load_renderer(tokenizer, tool_format=settings.tool_format),
        name=name,
        api_key=api_key,
        protocol=protocol,
        tokenizer=tokenizer,
        ca_file=ca_file,
    )
