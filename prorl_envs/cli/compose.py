"""Puts the parts together: node, environments, renderer, model servers, service. Nothing else does."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from prorl_envs.catalog import Catalog, entries
from prorl_envs.cli.console import err
from prorl_envs.config import DEFAULT_STORE, LimitSettings, ServiceSettings, Settings
from prorl_envs.env.harness.family import harness_of
from prorl_envs.env.node import Node, default_cache_dir
from prorl_envs.env.search import SearchSettings
from prorl_envs.errors import InputError
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.store import ImageStore
from prorl_envs.images.supervised import Limits as BuildLimits
from prorl_envs.policy.health import watching
from prorl_envs.policy.loading import load_renderer
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.probe import probe
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.servers import Protocol, Servers
from prorl_envs.rollout.defaults import Defaults
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.sqlite_store import SqliteStore, SqlStore
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.choice import choose_driver, make_driver
from prorl_envs.sandbox.containment import NodeLimits


def by_hand(catalog: Catalog, name: str) -> Catalog:
    """The environment called `name` alone, for whoever calls its tools. Says that a harness is left out."""
    if (harness := harness_of(catalog.family(name))) is not None:
        err.print(f"{name}: without the harness {harness.name}, by the environment's own tools")
    return catalog.by_hand(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model behind the rollouts.

    Args:
        servers: base URLs; where there are none, turns wait until one is added.
        renderer: its tokenizer and chat template.
        name: as the servers know it; None takes the first they name.
        api_key: bearer token of the servers.
        protocol: what servers speak whose URL does not say.
        tokenizer: folder or Hub name of the tokenizer, for other machines; "" where there is none.
    """

    servers: Sequence[str]
    renderer: TemplateRenderer
    name: str | None = None
    api_key: str | None = None
    protocol: Protocol = "auto"
    tokenizer: str = ""


def servers_of(model: Model) -> Servers:
    """What connects to the servers of a model."""
    return Servers.of(model.renderer, protocol=model.protocol, model=model.name, api_key=model.api_key)


@asynccontextmanager
async def node(settings: Settings) -> AsyncIterator[Node]:
    """This machine's sandboxes; closed on leaving.

    Raises:
        SandboxError: this machine cannot run them. Found out here, with one sandbox, instead of in every job.
    """
    programs = {"bwrap": settings.bwrap, "apptainer": settings.apptainer}
    name = await asyncio.to_thread(choose_driver, settings.driver, settings.run_dir, **programs)
    driver = make_driver(name, settings.run_dir, limits=node_limits(settings.limits), **programs)
    cache_dir = settings.cache_dir or default_cache_dir()
    images = functools.partial(image_builder, settings)
    search = search_of(settings)
    async with Node(
        driver, cache_dir, warm=settings.warm, search=search, images=images, pace=settings.pace
    ) as opened:
        await (await opened.sandbox(SandboxSpec())).close()
        yield opened


def search_of(settings: Settings) -> SearchSettings:
    """What search tools ask."""
    given = settings.search
    key = given.key.get_secret_value() if given.key else ""
    return SearchSettings(
        backend=given.backend, corpus=given.corpus, url=given.url, key=key, timeout_s=given.timeout_s
    )


def image_store(settings: Settings) -> ImageStore:
    """Where images are kept."""
    return ImageStore(settings.image_cache or (settings.cache_dir or default_cache_dir()) / "images")


def image_builder(settings: Settings, progress: Callable[[str], None]) -> ImageBuilder:
    """What builds images into the store.

    Args:
        progress: called with a short line as the work goes on.
    """
    limits = BuildLimits(seconds=settings.image_build_s, unpacked_bytes=settings.image_build_bytes)
    return ImageBuilder(image_store(settings), scratch=settings.run_dir, limits=limits, progress=progress)


def node_limits(settings: LimitSettings) -> NodeLimits:
    """The limits of this machine's sandboxes, as a driver takes them."""
    return NodeLimits.of(settings.model_dump())


@asynccontextmanager
async def rollout_service(
    settings: Settings, model: Model, *, durable: bool = False
) -> AsyncIterator[RolloutService]:
    """A service, not started yet, with everything it needs; what it needs is closed on leaving.

    Args:
        settings: all of them.
        model: the model behind it.
        durable: keep groups and results in `service.store`.

    Raises:
        InputError: the file cannot be opened, or an environment is wrong or its server does not start.
    """
    catalog, defaults = Catalog.of(settings), request_defaults(settings)
    async with AsyncExitStack() as stack:
        store = open_store(settings.service) if durable else None
        if store is not None:
            stack.push_async_callback(store.aclose)
        opened = await stack.enter_async_context(node(settings))
        pool = ModelPool(servers_of(model).connect, wait=not model.servers)
        stack.push_async_callback(pool.aclose)
        for url in model.servers:
            pool.add(url)
        await stack.enter_async_context(watching(pool))
        offered = await stack.enter_async_context(catalog)
        fleet = None
        if settings.nodes.wanted:
            from prorl_envs.cli.nodes import fleet_of

            fleet = await stack.enter_async_context(fleet_of(settings, model, pool, sorted(offered)))
        yield RolloutService(
            opened, offered, model.renderer, pool, settings.service, store, defaults=defaults, fleet=fleet
        )


def request_defaults(settings: Settings) -> dict[str, Defaults]:
    """The limits and the sampling that environments bring of their own.

    Raises:
        InputError: one is not known, or its value is wrong.
    """
    return {
        one.name: Defaults.of(one.name, one.settings.limits, one.settings.sampling)
        for one in entries(settings)
    }


def open_store(settings: ServiceSettings) -> SqlStore | None:
    """What keeps jobs and results; None for memory.

    Raises:
        InputError: it cannot be opened, or another service has it.
    """
    bounds = {
        "max_results": settings.keep_results,
        "max_tokens": settings.keep_tokens,
        "max_age_s": settings.keep_s,
    }
    match settings.store:
        case None:
            return None
        case Path():
            if settings.store == DEFAULT_STORE:
                with contextlib.suppress(OSError):  # the store says that it cannot be opened
                    settings.store.parent.mkdir(exist_ok=True)
            return SqliteStore(settings.store, **bounds)
        case SecretStr():
            from prorl_envs.rollout.postgres_store import PostgresStore  # an extra

            return PostgresStore(settings.store.get_secret_value(), **bounds)


async def connect(
    servers: Sequence[str],
    *,
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
    protocol: Protocol = "auto",
    tool_format: str = "auto",
) -> Model:
    """Look at the user's model servers before anything is sent to them.

    Args:
        servers: base URLs of servers of one model.
        tokenizer: folder or Hub name of its tokenizer; None takes the name the first server gives.
        name: model name; None takes the first the server names.
        api_key: bearer token, if they want one.
        protocol: what servers speak whose URL does not say.
        tool_format: how the model writes tool calls; `auto` asks its chat template.

    Raises:
        InputError: a server does not speak token-in/token-out, or the tokenizer is not to be had.
    """
    for url in servers:
        report = await probe(url, protocol=protocol, model=name, api_key=api_key)
        if not report.ok:
            raise InputError(report.problem, hint=report.hint)
        name = name or report.model
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
    )
