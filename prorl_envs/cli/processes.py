"""Further processes of this machine as nodes, each with an event loop of its own: `nodes.processes`.

The service starts them, starts one again that died, and ends them. What it and they say to each other passes
through the connection of every node (0035 in docs/decisions).
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_envs.cli.logs import exporting_traces, set_up_logging
from prorl_envs.cli.nodes import limits_of, work
from prorl_envs.config import NodeSettings, ServerSettings, Settings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.nodes.channel import ChannelClosed
from prorl_envs.rollout.nodes.fleet import Fleet

log = logging.getLogger(__name__)

#: Seconds before a process that ended is started again: at first, and at most.
_AGAIN_S, _AGAIN_AT_MOST_S = 0.5, 30.0
#: Seconds that a process has to live for the next pause to be the first again.
_LIVED_S = 60.0
#: What processes and their sandboxes give way by, on a machine with more to do than it has cores: to the
#: service that answers trainers, and to a model server beside it.
_NICE = 10
_BOOT = f"import sys; from {__name__} import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class _Part:
    """One process's part, sent to it as a pickle over its standard input: it has secrets."""

    settings: Settings
    head: str
    token: str
    name: str
    api_key: str | None


@asynccontextmanager
async def processes(settings: Settings, fleet: Fleet, head: str, token: str) -> AsyncIterator[None]:
    """Keep `nodes.processes` processes at work while the block runs.

    Args:
        settings: of the service; the processes share its pools evenly.
        fleet: that they join; it is closed on leaving.
        head: where they join, HOST:PORT.
        token: what lets them in.

    Raises:
        InputError: there are fewer episodes in RUN than processes.
    """
    count = settings.nodes.processes
    if count > settings.service.run:
        raise InputError(
            f"{count} processes for {settings.service.run} episodes at once",
            hint="nodes.processes: at most service.run",
        )
    api_key = os.environ.get("OPENAI_API_KEY") or None
    parts = [
        _Part(share(settings, index), head, token, f"{socket.gethostname()}-{index + 1}", api_key)
        for index in range(count)
    ]
    keeping = [asyncio.create_task(_keep(part)) for part in parts]
    try:
        yield
    finally:
        await fleet.aclose()  # which tells those that joined that it is the end
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


def share(settings: Settings, index: int) -> Settings:
    """One process's settings: its share of everything that counts for the machine.

    Args:
        index: of the process, from 0. The first ones have one more where it does not come out even.
    """
    count = settings.nodes.processes

    def part(number: int) -> int:
        return number // count + (index < number % count)

    service = settings.service
    pools = {name: max(1, part(getattr(service, name))) for name in ("init", "run", "eval")}
    live = None if service.live is None else max(1, part(service.live))
    return settings.model_copy(
        update={
            "server": ServerSettings(),
            "nodes": NodeSettings(),
            "service": service.model_copy(update={**pools, "live": live, "store": None}),
            "warm": part(settings.warm),
        }
    )


async def _keep(part: _Part) -> None:
    """Have a process work, and another one after its end, until cancelled; then wait for its end."""
    again_s = _AGAIN_S
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            # A Ctrl-C in the terminal is for the service, which then ends its processes in order.
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(part))
            process.stdin.close()
            code = await process.wait()
        except asyncio.CancelledError:
            await _ended(process, part)
            raise
        if loop.time() - began > _LIVED_S:
            again_s = _AGAIN_S
        log.error("process %s ended (%s); another one begins in %g s", part.name, code, again_s)
        await asyncio.sleep(again_s)
        again_s = min(again_s * 2, _AGAIN_AT_MOST_S)


async def _ended(process: asyncio.subprocess.Process, part: _Part) -> None:
    """Wait for a process that was told to end, or has lost its service; in the end, kill it."""
    try:
        async with asyncio.timeout(part.settings.service.close_s):
            await process.wait()
    except TimeoutError:
        log.error("process %s does not end, and is killed", part.name)
        process.kill()
        await process.wait()


def main() -> int:
    """Be one of the processes."""
    part: _Part = pickle.load(sys.stdin.buffer)  # the service's own, over our own pipe
    os.nice(_NICE)
    set_up_logging(part.settings.log)
    working = work(
        part.settings,
        part.head,
        part.token,
        name=part.name,
        limits=limits_of(part.settings.service),
        api_key=part.api_key,
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exporting_traces():
            asyncio.run(working)
    except ChannelClosed as error:
        log.warning("%s", error)
        return 1
    except ProrlError as error:
        log.error("%s cannot be a node: %s", part.name, error)
        return 1
    return 0
