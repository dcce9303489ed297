"""`prorl-envs serve`: the rollout service in the foreground, until a signal to stop."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from socket import socket

from prorl_envs.app.compose import (
    EarlierModel,
    Model,
    earlier_model,
    keep_model,
    node,
    open_store,
    request_defaults,
)
from prorl_envs.app.logs import exporting_traces, set_up_logging
from prorl_envs.app.service import rollout_service
from prorl_envs.app.tuning import settled
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err
from prorl_envs.config import ServerSettings, Settings
from prorl_envs.env.node import Node
from prorl_envs.rollout.http.auth import Logins, require_token
from prorl_envs.rollout.http.server import bind, needs_token, serve_until_signal
from prorl_envs.rollout.store.sql import SqlStore

type Connect = Callable[[EarlierModel | None], Awaitable[Model]]


async def serve(settings: Settings, connect: Connect) -> None:
    """Serve until a signal to stop, then drain. A second SIGINT or SIGTERM stops at once.

    Configuration, address, machine and store are checked before the first request to a model server.

    Args:
        settings: all settings.
        connect: function that probes the model servers; its argument is the model of the store's unfinished
            jobs, or None.

    Raises:
        InputError: the address cannot be bound, or needs a token; the store cannot be opened; or `connect`
            failed.
        UnsupportedMachine: no sandbox can start on this machine.
    """
    set_up_logging(settings.log)
    require_token(settings.server)
    Catalog.of(settings)
    request_defaults(settings)
    async with AsyncExitStack() as stack:
        bound = stack.enter_context(closing(bind(settings.server.host, settings.server.port)))
        opened = await stack.enter_async_context(node(settings))
        store = open_store(settings.service)
        if store is not None:
            stack.push_async_callback(store.aclose)
        model = await connect(await earlier_model(store))
        await keep_model(store, model)
        await _serve(settings, model, store, bound, opened)


async def _serve(
    settings: Settings, model: Model, store: SqlStore | None, bound: socket, opened: Node
) -> None:
    def ready(url: str) -> None:
        err.print(f"rollout service: {url}   (documentation: {url}/openapi.json)")
        err.print(f"dashboard:       {url}{_dashboard(settings.server, logins)}")
        for server in model.servers:
            err.print(f"model server:    {server}")
        if not model.servers:
            err.print("model server:    none yet; turns wait for the first (`prorl-envs servers add URL`)")
        unfinished = service.status().unfinished
        resuming = f"   ({unfinished} unfinished jobs resume)" if unfinished else ""
        err.print(f"store:           {settings.service.store or 'memory, lost at a restart'}{resuming}")
        if settings.nodes.ray is not None:
            err.print(f"nodes:           machines of the Ray cluster {settings.nodes.ray}")
        err.print("Ctrl-C stops it")

    logins = Logins()
    with exporting_traces():
        async with rollout_service(settings, model, store, opened=opened) as service:
            settled()
            await serve_until_signal(service, settings.server, ready=ready, logins=logins, bound=bound)


def _dashboard(settings: ServerSettings, logins: Logins) -> str:
    """Return the dashboard's path; on a terminal, a link that signs in, which logs must not contain."""
    if not needs_token(settings) and settings.token is None:
        return "/dashboard"
    if err.is_terminal:
        return logins.link()
    return "/dashboard   (`prorl-envs dashboard` prints a link that signs in)"
