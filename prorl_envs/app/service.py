"""Composition of a rollout service: its node, environments, model servers and further nodes."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prorl_envs.app.compose import Model, node, request_defaults, servers_of
from prorl_envs.catalog import Catalog
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.model.routing.health import watching
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.build import build_service
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sqlite import SqlStore
from prorl_envs.sandbox.linux.descriptors import sandboxes_allowed

logger = logging.getLogger(__name__)


@asynccontextmanager
async def rollout_service(
    settings: Settings, model: Model, store: SqlStore | None = None, *, opened: Node | None = None
) -> AsyncIterator[RolloutService]:
    """Create a service with all its parts, without starting it; close the parts on exit.

    Args:
        settings: all settings.
        model: the model that the service uses.
        store: store of groups and results, which the caller closes; None means memory.
        opened: node that the caller opened by `node` and closes; None opens a node.

    Raises:
        InputError: an environment is wrong, or its server does not start.
    """
    catalog, defaults = Catalog.of(settings), request_defaults(settings)
    _warn_of_capacity(settings.service)
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


def _warn_of_capacity(settings: ServiceSettings) -> None:
    """Warn if this machine's limits allow fewer sandboxes than the settings: then jobs wait.

    Raises:
        UnsupportedMachine: a limit is too low for a single sandbox.
    """
    jobs, max_sandboxes = StageLimits.of_settings(settings).max_jobs_with_sandbox, sandboxes_allowed()
    if jobs > max_sandboxes:
        logger.warning(
            "at most %d of %d jobs have a sandbox at once, and others wait: a process may open no more files "
            "here, or this user may have no more processes (raise `ulimit -Hn` and `ulimit -Hu`)",
            max_sandboxes,
            jobs,
        )
