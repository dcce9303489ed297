"""Nodes on several machines: the fleet of a service, and the command that joins a fleet as a node."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from prorl_envs.app.compose import Model, absolute_tokenizer, check_capacity, node, servers_of
from prorl_envs.app.logs import exporting_traces, set_up_logging
from prorl_envs.app.run_loop import settled
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err
from prorl_envs.config import NodeSettings, ServiceSettings, Settings
from prorl_envs.errors import InputError
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.rollout.client.token_files import addresses_of, kept_token, new_token, read_token
from prorl_envs.rollout.nodes.channel import ChannelClosed, connect
from prorl_envs.rollout.nodes.fleet import Fleet, Terms
from prorl_envs.rollout.nodes.lifecycle import NodeResources, fingerprint, take_part
from prorl_envs.rollout.nodes.listener import is_loopback, joining
from prorl_envs.rollout.nodes.messages import Hello
from prorl_envs.rollout.nodes.worker import NodeWorker
from prorl_envs.rollout.scheduling.placement import StageLimits

log = logging.getLogger(__name__)

#: Seconds between two attempts to reach the service: at first, and at most.
_AGAIN_S, _AGAIN_AT_MOST_S = 1.0, 30.0
#: Address to connect to on this machine if the service binds all addresses.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def require_node_token(nodes: NodeSettings) -> None:
    """Refuse settings that admit nodes of other machines without a token.

    Raises:
        InputError: a host other than loopback without a token.
    """
    if nodes.wanted and not is_loopback(nodes.host) and not nodes.token and nodes.ray is None:
        raise InputError(
            f"binding {nodes.host} lets other machines in, so a token is needed",
            hint="set nodes.token (PRORL_NODES__TOKEN), 16 characters or more, on all machines",
        )


@asynccontextmanager
async def fleet_of(
    settings: Settings, model: Model, pool: ModelPool, environments: Sequence[str]
) -> AsyncIterator[Fleet]:
    """Open the fleet of a service, which nodes may join.

    Args:
        environments: names that a node must know.

    Raises:
        InputError: the address cannot be bound, or needs a token; or Ray is unavailable.
    """
    nodes, service = settings.nodes, settings.service
    require_node_token(nodes)
    host, token = nodes.host, nodes.token.get_secret_value() if nodes.token else ""
    terms = Terms(
        environments=environments,
        fingerprint=fingerprint(model.renderer),
        tokenizer=absolute_tokenizer(model.tokenizer),
        model=model.name or "",
        protocol=model.protocol,
        tool_format=model.renderer.tool_format,
        reasoning=service.reasoning,
        heartbeat_s=nodes.heartbeat_timeout_s / 6,
        heartbeat_timeout_s=nodes.heartbeat_timeout_s,
        grace_s=service.grace_s,
        close_s=service.close_s,
        start_s=nodes.start_s,
    )
    fleet = Fleet(pool, terms, head_takes_jobs=nodes.run_on_head)
    async with AsyncExitStack() as stack:
        address = ""
        if nodes.ray is not None:
            from prorl_envs.app.ray_nodes import ray_cluster, ray_nodes  # an extra

            address = await stack.enter_async_context(ray_cluster(nodes.ray))
            host = address if is_loopback(host) else host
        generated = not token
        token = token or new_token()  # passed to the nodes that this service starts
        await stack.enter_async_context(joining(fleet, host=host, port=nodes.port or 0, token=token))
        if generated and nodes.port is not None and nodes.ray is None:
            for bound in addresses_of(f"http://{_bracketed(host)}:{fleet.port}"):
                stack.enter_context(kept_token(token, bound, "nodes"))
        if nodes.ray is not None:
            await stack.enter_async_context(ray_nodes(settings, fleet, address, token))
        if nodes.processes:
            from prorl_envs.app.processes import processes  # imports this module

            here = f"{_HERE.get(host, host)}:{fleet.port}"
            await stack.enter_async_context(processes(settings, fleet, here, token))
        yield fleet


def limits_of(settings: ServiceSettings, run: int | None = None) -> StageLimits:
    """Return how many jobs may run at once on one machine, by stage.

    Args:
        run: episodes in RUN at once, if not the settings'; the other pools scale by the same factor.
    """
    limits = StageLimits.of_settings(settings)
    if run is None:
        return limits

    def scaled(number: int) -> int:
        return max(1, round(number * run / settings.run))

    return replace(
        limits,
        init=scaled(limits.init),
        run=scaled(limits.run),
        eval=scaled(limits.eval),
        max_jobs_with_sandbox=scaled(limits.max_jobs_with_sandbox),
    )


async def work(
    settings: Settings,
    head: str,
    token: str,
    *,
    name: str,
    limits: StageLimits,
    api_key: str | None = None,
    joined: Callable[[NodeWorker], None] = lambda member: None,
) -> None:
    """Work as a node of the service at `head` (HOST:PORT) until the service closes the connection.

    Raises:
        ChannelClosed: the service cannot be reached, or the connection is lost.
        InputError: the service refuses this machine, or the tokenizer or an environment is missing here.
        SandboxError: this machine cannot run sandboxes.
    """
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{head!r} is not where a service is", hint="HOST:PORT, its nodes.port")

    @asynccontextmanager
    async def prepare(welcome: Hello) -> AsyncIterator[NodeResources]:
        folder = settings.model.tokenizer or welcome.tokenizer
        if not folder:
            raise InputError("the service names no tokenizer", hint="model.tokenizer: its folder or Hub name")
        renderer = await asyncio.to_thread(load_renderer, str(folder), tool_format=welcome.tool_format)
        model = Model(
            servers=(),
            renderer=renderer,
            name=welcome.model or None,
            api_key=api_key,
            protocol=welcome.protocol,
            ca_file=settings.model.ca_file,
        )
        async with node(settings) as opened, Catalog.of(settings) as offered:
            settled()
            yield NodeResources(opened, offered, renderer, servers_of(model).connect)

    channel = await connect(host, int(port), token)
    await take_part(channel, prepare, name=name, limits=limits, joined=joined)


async def keep_working(
    settings: Settings, head: str, *, name: str | None, said: Callable[[str], None]
) -> None:
    """Work as a node until SIGINT or SIGTERM; reconnect if the service starts later or restarts. The first
    signal finishes the jobs of this node, within `service.drain_s`; a second one stops them at once.

    Args:
        said: called with each message for the user.

    Raises:
        InputError, SandboxError: as `check_capacity` and `work`.
    """
    check_capacity(settings.service)
    configured = settings.nodes.token.get_secret_value() if settings.nodes.token else None
    members: list[NodeWorker] = []

    def joined(member: NodeWorker) -> None:
        members.append(member)
        said(f"joined {head}")

    async def always() -> None:
        again_s, why = _AGAIN_S, ""
        while True:
            try:
                await work(
                    settings,
                    head,
                    configured or token_of(head),
                    name=name or socket.gethostname(),
                    limits=limits_of(settings.service),
                    api_key=os.environ.get("OPENAI_API_KEY") or None,
                    joined=joined,
                )
                why = ""
                said("the service has ended this node's work")
            except ChannelClosed as error:
                if str(error) != why:  # do not repeat the message on every attempt
                    said(str(error))
                why = str(error)
            again_s = _AGAIN_S if members else min(again_s * 2, _AGAIN_AT_MOST_S)
            members.clear()
            await asyncio.sleep(again_s)

    first, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: (second if first.is_set() else first).set())
    working = asyncio.create_task(always())
    leaving = asyncio.create_task(first.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        elif members:
            said(f"leaving when the jobs here are done, within {settings.service.drain_s:g} s")
            members[-1].leave()
            # The head closes the connection, since it knows of jobs that are still on their way here.
            await _until(lambda: not members, settings.service.drain_s, second)
    finally:
        leaving.cancel()
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


def token_of(head: str) -> str:
    """Return the token that a service of the same user on this machine generated for nodes.

    Args:
        head: HOST:PORT where nodes join.

    Raises:
        ChannelClosed: there is no token (yet).
    """
    host, _, port = head.rpartition(":")
    for address in addresses_of(f"http://{_bracketed(host)}:{port}"):
        if (token := read_token(address, "nodes")) is not None:
            return token
    raise ChannelClosed(f"no token for {head} is known: set nodes.token, or start the service there")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def serve_node(settings: Settings, head: str, name: str | None) -> None:
    """Work as a node in the foreground, with logs and traces; see `keep_working`."""
    set_up_logging(settings.log)
    with exporting_traces():
        await keep_working(settings, head, name=name, said=err.print)


async def _until(holds: Callable[[], bool], seconds: float, hurry: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not holds() and not hurry.is_set():  # noqa: ASYNC110 - seconds, at the end of a process
                await asyncio.sleep(0.1)
