"""Composition of a rollout service: its node, environments, model servers and further nodes."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prorl_envs.app.compose import Model, node, request_defaults, servers_of
from prorl_envs.catalog import Catalog
from prorl_envs.config import Settings
from prorl_envs.env.node import Node
from prorl_envs.model.routing.health import watching
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sql import SqlStore


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
        InputError: an environment is wrong.
    """
    catalog, defaults = Catalog.of(settings), request_defaults(settings)
    async with AsyncExitStack() as stack:
        if opened is None:
            opened = await stack.enter_async_context(node(settings))
        pool = ModelPool(servers_of(model).connect, wait=True)
        stack.push_async_callback(pool.aclose)
        for url in model.servers:
            pool.add(url)
        await stack.enter_async_context(watching(pool))
        fleet = None
        if settings.nodes.ray is not None:
            from prorl_envs.app.ray import fleet_of  # an extra

            fleet = await stack.enter_async_context(fleet_of(settings, model, pool, sorted(catalog)))
        yield RolloutService(
            opened, catalog, model.renderer, pool, settings.service, store, defaults=defaults, fleet=fleet
        )
