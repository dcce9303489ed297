"""Past one machine: the fleet of a service that is served, and a machine that takes part in one."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prorl_envs.catalog import Catalog
from prorl_envs.cli.compose import Model, node, servers_of
from prorl_envs.cli.console import err
from prorl_envs.cli.logs import exporting_traces, set_up_logging
from prorl_envs.cli.running import settled
from prorl_envs.config import ServiceSettings, Settings
from prorl_envs.errors import InputError
from prorl_envs.policy.loading import load_renderer
from prorl_envs.policy.pool import ModelPool
from prorl_envs.rollout.nodes.channel import ChannelClosed, connect
from prorl_envs.rollout.nodes.door import is_loopback, joining
from prorl_envs.rollout.nodes.fleet import Fleet, Terms
from prorl_envs.rollout.nodes.joining import Prepared, fingerprint, take_part
from prorl_envs.rollout.nodes.member import Member
from prorl_envs.rollout.nodes.messages import Welcome
from prorl_envs.rollout.placement import Limits

log = logging.getLogger(__name__)

#: Seconds between two tries to reach the service: at first, and at most.
_AGAIN_S, _AGAIN_AT_MOST_S = 1.0, 30.0
#: What to call on this machine where any of its addresses is bound.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@asynccontextmanager
async def fleet_of(
    settings: Settings, model: Model, pool: ModelPool, environments: Sequence[str]
) -> AsyncIterator[Fleet]:
    """The fleet of a service, which nodes may join.

    Args:
        environments: names that a node has to know.

    Raises:
        InputError: the address cannot be bound, or needs a token; or Ray is not there.
    """
    nodes, service = settings.nodes, settings.service
    host, token = nodes.host, nodes.token.get_secret_value() if nodes.token else ""
    if not is_loopback(host) and not token and nodes.ray is None:
        raise InputError(
            f"binding {host} lets other machines in, so a token is needed",
            hint="set nodes.token (PRORL_NODES__TOKEN), 16 characters or more, on all machines",
        )
    terms = Terms(
        environments=environments,
        fingerprint=fingerprint(model.renderer),
        tokenizer=_found(model.tokenizer),
        model=model.name or "",
        protocol=model.protocol,
        tool_format=model.renderer.tool_format,
        reasoning=service.reasoning,
        beat_s=nodes.silent_s / 6,
        silent_s=nodes.silent_s,
        grace_s=service.grace_s,
        close_s=service.close_s,
        start_s=nodes.start_s,
    )
    fleet = Fleet(pool, terms, head_takes_jobs=nodes.head)
    async with AsyncExitStack() as stack:
        address = ""
        if nodes.ray is not None:
            from prorl_envs.cli.ray_nodes import ray_cluster, ray_nodes  # an extra

            address = await stack.enter_async_context(ray_cluster(nodes.ray))
            host = address if is_loopback(host) else host
        elif nodes.port is not None:
            token = token or "loopback"  # what `prorl-envs node` says without one
        token = token or secrets.token_hex(32)  # carried to those that we start ourselves
        await stack.enter_async_context(joining(fleet, host=host, port=nodes.port or 0, token=token))
        if nodes.ray is not None:
            await stack.enter_async_context(ray_nodes(settings, fleet, address, token))
        if nodes.processes:
            from prorl_envs.cli.processes import processes  # which is made of this

            here = f"{_HERE.get(host, host)}:{fleet.port}"
            await stack.enter_async_context(processes(settings, fleet, here, token))
        yield fleet


def _found(tokenizer: str) -> str:
    """A tokenizer's folder as other machines find it, or its Hub name."""
    if not tokenizer:
        return ""  # they have their own
    folder = Path(tokenizer)
    return str(folder.resolve()) if folder.is_dir() else tokenizer


def limits_of(settings: ServiceSettings, run: int | None = None) -> Limits:
    """How much may happen on one machine.

    Args:
        run: episodes in RUN at once, where that is not the settings'; the other pools are as much larger or
            smaller.
    """
    scale = 1.0 if run is None else run / settings.run
    live = settings.live or settings.init + settings.run + settings.eval

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    return Limits(
        init=scaled(settings.init), run=scaled(settings.run), eval=scaled(settings.eval), live=scaled(live)
    )


async def work(
    settings: Settings,
    head: str,
    token: str,
    *,
    name: str,
    limits: Limits,
    api_key: str | None = None,
    joined: Callable[[Member], None] = lambda member: None,
) -> None:
    """Be a node of the service at `head` (HOST:PORT), until it says that it is the end.

    Raises:
        ChannelClosed: it is not there, or is gone.
        InputError: it refuses this machine; or the tokenizer or an environment is not to be had here.
        SandboxError: this machine cannot run sandboxes.
    """
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{head!r} is not where a service is", hint="HOST:PORT, its nodes.port")

    @asynccontextmanager
    async def prepare(welcome: Welcome) -> AsyncIterator[Prepared]:
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
        )
        async with node(settings) as opened, Catalog.of(settings) as offered:
            settled()
            yield Prepared(opened, offered, renderer, servers_of(model).connect)

    channel = await connect(host, int(port), token)
    await take_part(channel, prepare, name=name, limits=limits, joined=joined)


async def keep_working(
    settings: Settings, head: str, *, name: str | None, said: Callable[[str], None]
) -> None:
    """Be a node until SIGINT or SIGTERM, also of a service that starts later or again. The first signal
    finishes the jobs that are here, within `service.drain_s`; a second one ends them at once.

    Args:
        said: told what people want to know.

    Raises:
        InputError, SandboxError: as `work`.
    """
    token = settings.nodes.token.get_secret_value() if settings.nodes.token else "loopback"
    members: list[Member] = []

    def joined(member: Member) -> None:
        members.append(member)
        said(f"joined {head}")

    async def always() -> None:
        again_s, why = _AGAIN_S, ""
        while True:
            try:
                await work(
                    settings,
                    head,
                    token,
                    name=name or socket.gethostname(),
                    limits=limits_of(settings.service),
                    api_key=os.environ.get("OPENAI_API_KEY") or None,
                    joined=joined,
                )
                why = ""
                said("the service has ended this node's work")
            except ChannelClosed as error:
                if str(error) != why:  # it may try for long
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
            # The head ends it, which knows of jobs that are still on their way here.
            await _until(lambda: not members, settings.service.drain_s, second)
    finally:
        leaving.cancel()
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def serve_node(settings: Settings, head: str, name: str | None) -> None:
    """Be a node in the foreground, with logs and traces; see `keep_working`."""
    set_up_logging(settings.log)
    with exporting_traces():
        await keep_working(settings, head, name=name, said=err.print)


async def _until(holds: Callable[[], bool], seconds: float, hurry: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not holds() and not hurry.is_set():  # noqa: ASYNC110 - seconds, at the end of a process
                await asyncio.sleep(0.1)
