"""Composition of node, environments, renderer, model servers and service. Only this module wires them."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from prorl_envs.catalog import Catalog, entries
from prorl_envs.cli.output.console import err
from prorl_envs.config import DEFAULT_STORE, LimitSettings, ServiceSettings, Settings
from prorl_envs.env.harness.family import harness_of
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
from prorl_envs.model.routing.health import watching
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Protocol, Servers
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.episode.defaults import Defaults
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.build import build_service
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqliteStore, SqlStore
from prorl_envs.sandbox.base import Driver, Network, SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.select import LAYERED_DRIVERS, choose_driver, make_driver
from prorl_envs.sandbox.limits.enforcement import NodeLimits
from prorl_envs.sandbox.linux.descriptors import sandboxes_allowed


def without_harness(catalog: Catalog, name: str) -> Catalog:
    """Return a catalog of the environment `name` alone, without its harness; print a note if it has one."""
    if (harness := harness_of(catalog.family(name))) is not None:
        err.print(f"{name}: without the harness {harness.name}, by the environment's own tools")
    return catalog.without_harness(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model behind the rollouts.

    Args:
        servers: base URLs; if empty, turns wait until a server is added.
        renderer: its tokenizer and chat template.
        name: as the servers know it; None takes the first model that they list.
        api_key: bearer token of the servers.
        protocol: of servers whose URL does not name one.
        tokenizer: folder or Hub name of the tokenizer, for other machines; "" if there is none.
        ca_file: certificates (PEM) of the authorities to trust; None trusts the public ones.
    """

    servers: Sequence[str]
    renderer: TemplateRenderer
    name: str | None = None
    api_key: str | None = None
    protocol: Protocol = "auto"
    tokenizer: str = ""
    ca_file: Path | None = None


class EarlierModel(BaseModel):
    """Model of the last service on a store, saved for a restart while its model servers are down.

    Args:
        name: as the servers know it; "" if unknown.
        tokenizer: folder or Hub name.
    """

    name: str = ""
    tokenizer: str = ""


#: Key of this value in the store.
_EARLIER = "model"


async def earlier_model(store: SqlStore | None) -> EarlierModel | None:
    """Return the model of a store's unfinished jobs; None if there are none."""
    if store is None or not await store.unfinished():
        return None
    kept = await store.get_value(_EARLIER)
    return EarlierModel() if kept is None else EarlierModel.model_validate_json(kept)


async def keep_model(store: SqlStore | None, model: Model) -> None:
    """Save the model's name and tokenizer in the store for a restart."""
    if store is not None:
        kept = EarlierModel(name=model.name or "", tokenizer=absolute_tokenizer(model.tokenizer))
        await store.put_value(_EARLIER, kept.model_dump_json())


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
    """Open the node that runs this machine's sandboxes; close it on leaving.

    Raises:
        SandboxError: this machine cannot run sandboxes. One test sandbox finds this out before the first job.
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
        limits=node_limits(settings.limits).each,
        max_concurrent_starts=settings.sandbox.max_concurrent_starts,
    ) as opened:
        await (await opened.sandbox(SandboxSpec())).close()
        yield opened


def search_of(settings: Settings) -> SearchSettings:
    """Return the settings of the search backend."""
    given = settings.search
    key = given.key.get_secret_value() if given.key else ""
    return SearchSettings(
        backend=given.backend, corpus=given.corpus, url=given.url, key=key, timeout_s=given.timeout_s
    )


def driver_name(settings: Settings) -> str:
    """Return the name of the driver for the sandboxes of this machine. It blocks: drivers are tried.

    Raises:
        SandboxError: none works here.
    """
    return choose_driver(settings.driver, settings.run_dir, **_programs(settings))


async def sandbox_driver(settings: Settings) -> NodeDriver[Any]:
    """Make the driver for the sandboxes of this machine; the caller closes it.

    Raises:
        SandboxError: none works here.
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


def image_puller(settings: Settings, progress: Callable[[str], None]) -> ImagePuller:
    """Return the native client of registries, with the store of layers.

    Args:
        progress: called with a short line on each progress.
    """
    registries = RegistrySettings(mirrors=settings.images.mirrors, insecure=settings.images.insecure)
    pulls = PullSettings(
        registry=registries,
        bases=settings.images.bases,
        limits=UnpackLimits(unpacked_bytes=settings.image_build_bytes),
        seconds=settings.image_build_s,
    )
    return ImagePuller(layer_store(settings), pulls, progress=progress)


def image_builder(settings: Settings, progress: Callable[[str], None], *, driver: str = "") -> ImageBuilder:
    """Return a builder that writes images into the store.

    Args:
        progress: called with a short line on each progress.
        driver: driver of the sandboxes; `docker://` images are pulled as layers if it can use these.
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
    """Open a builder of Dockerfiles with the driver of its sandboxes; close the driver on leaving.

    Args:
        bases, allow: in addition to those of the settings.

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
        driver: driver of its sandboxes.
        bases, allow: in addition to those of the settings.
    """
    puller = image_puller(settings, lambda line: None)
    return DockerfileBuilder(
        puller.store,
        driver,
        puller=puller,
        bases={**settings.images.bases, **(bases or {})},
        network=Network(allow=(*settings.images.allow, *allow)),
        limits=DockerfileLimits(run_s=settings.image_build_s),
        scratch=settings.run_dir,
    )


def node_limits(settings: LimitSettings) -> NodeLimits:
    """Convert the limit settings of this machine's sandboxes for a driver."""
    return NodeLimits.of(settings.model_dump())


@asynccontextmanager
async def rollout_service(
    settings: Settings, model: Model, store: SqlStore | None = None, *, opened: Node | None = None
) -> AsyncIterator[RolloutService]:
    """Create a service with all its parts, not started yet; close the parts on leaving.

    Args:
        settings: all of them.
        model: the model behind it.
        store: keeps groups and results; the caller closes it. None keeps them in memory.
        opened: result of `node`, which the caller closes; None opens one.

    Raises:
        InputError: an environment is wrong or its server does not start, or see `check_capacity`.
    """
    catalog, defaults = Catalog.of(settings), request_defaults(settings)
    check_capacity(settings.service)
    async with AsyncExitStack() as stack:
        if opened is None:
            opened = await stack.enter_async_context(node(settings))
        pool = ModelPool(servers_of(model).connect, wait=True)
        stack.push_async_callback(pool.aclose)
        for url in model.servers:
            pool.add(url)
        await stack.enter_async_context(watching(pool))
        offered = await stack.enter_async_context(catalog)
        fleet = None
        if settings.nodes.ray is not None:
            from prorl_envs.app.ray import fleet_of  # an extra

            fleet = await stack.enter_async_context(fleet_of(settings, model, pool, sorted(offered)))
        yield build_service(
            opened, offered, model.renderer, pool, settings.service, store, defaults=defaults, fleet=fleet
        )


def check_capacity(settings: ServiceSettings) -> None:
    """Check that a process of this machine can hold as many sandboxes at once as its settings allow.

    Raises:
        InputError: it cannot.
    """
    jobs, most = StageLimits.of_settings(settings).max_jobs_with_sandbox, sandboxes_allowed()
    if jobs > most:
        raise InputError(
            f"{jobs} jobs with sandboxes at once need more files than a process may open here: "
            f"enough for {most}",
            hint="raise the hard limit (`ulimit -Hn`), or lower service.max_jobs_with_sandbox (or init, run, "
            "eval)",
        )


def request_defaults(settings: Settings) -> dict[str, Defaults]:
    """Return the limits and the sampling that the configuration sets for each environment.

    Raises:
        InputError: a name is unknown, or its value is wrong.
    """
    return {
        one.name: Defaults.of(one.name, one.settings.limits, one.settings.sampling)
        for one in entries(settings)
    }


def open_store(settings: ServiceSettings) -> SqlStore | None:
    """Open the store of jobs and results; return None for memory.

    Raises:
        InputError: the store cannot be opened, or another service uses it.
    """
    bounds = settings.retention.of_results
    match settings.store:
        case None:
            return None
        case Path():
            if settings.store == DEFAULT_STORE:
                with contextlib.suppress(OSError):  # the store reports that it cannot be opened
                    settings.store.parent.mkdir(exist_ok=True)
            return SqliteStore(settings.store, **bounds)
        case SecretStr():
            from prorl_envs.rollout.store.postgres import PostgresStore  # an extra

            return PostgresStore(settings.store.get_secret_value(), **bounds)


async def connect(
    servers: Sequence[str],
    *,
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
    protocol: Protocol = "auto",
    tool_format: str = "auto",
    ca_file: Path | None = None,
    earlier: EarlierModel | None = None,
) -> Model:
    """Probe the user's model servers before any other request.

    Args:
        servers: base URLs of servers of one model.
        tokenizer: folder or Hub name of its tokenizer; None takes the model name of the first server.
        name: model name; None takes the first that the server lists.
        api_key: bearer token, if the servers need one.
        protocol: of servers whose URL does not name one.
        tool_format: how the model writes tool calls; `auto` asks its chat template.
        ca_file: certificates (PEM) of the authorities to trust; None trusts the public ones.
        earlier: the model of unfinished jobs, which wait for a server that is unavailable now.

    Raises:
        InputError: a server is unavailable and no job is unfinished, or it does not speak token-in/token-out,
            or the tokenizer cannot be loaded, or the CA file cannot be used.
    """
    for url in servers:
        report = await probe(url, protocol=protocol, model=name, api_key=api_key, ca_file=ca_file)
        if not report.ok and (earlier is None or not report.unavailable):
            raise InputError(report.problem, hint=report.hint)
        if not report.ok:
            err.print(f"warning: {report.problem}; unfinished jobs wait for it")
        name = name or report.model
    if earlier is not None:
        name, tokenizer = name or earlier.name or None, tokenizer or earlier.tokenizer or None
    if tokenizer is None and not name:
        raise InputError("the server names no model", hint="name its tokenizer: --tokenizer FOLDER")
    tokenizer = tokenizer or str(name)
    return Model(
        servers=servers,
        renderer=load_renderer(tokenizer, tool_format=tool_format),
        name=name,
        api_key=api_key,
        protocol=protocol,
        tokenizer=tokenizer,
        ca_file=ca_file,
    )
