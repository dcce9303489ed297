"""Composition of a rollout service: its node, environments, model servers and further nodes."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prorl_envs.app.compose import Model, node, request_defaults, servers_of
from prorl_envs.catalog import Catalog
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError
from prorl_envs.model.routing.health import watching
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.sandbox.linux.descriptors import sandboxes_allowed


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
        InputError: an environment is wrong, its server does not start, or `check_capacity` fails.
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
        yield RolloutService(
            opened, offered, model.renderer, pool, settings.service, store, defaults=defaults, fleet=fleet
        )


def check_capacity(settings: ServiceSettings) -> None:
    """Check that a process may open enough files for as many sandboxes as the settings allow.

    Raises:
        InputError: the limit of open files is too low.
    """
    jobs, max_sandboxes = StageLimits.of_settings(settings).max_jobs_with_sandbox, sandboxes_allowed()
    if jobs > max_sandboxes:
        raise InputError(
            f"{jobs} jobs with sandboxes at once need more files than a process may open here: "
            f"the limit is enough for {max_sandboxes}",
            hint="raise the hard limit (`ulimit -Hn`), or lower service.max_jobs_with_sandbox (or init, run, "
            "eval)",
        )
