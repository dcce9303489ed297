"""Further processes of this machine as nodes, each with its own event loop: `nodes.processes`.

The service starts the processes, restarts one that died, and stops them. Messages between the service and a
process go through the connection of that node (docs/decisions/nodes.md).
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

from prorl_envs.app.logs import exporting_traces, set_up_logging
from prorl_envs.app.nodes import limits_of, work
from prorl_envs.config import NodeSettings, ServerSettings, Settings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.nodes.channel import ChannelClosed
from prorl_envs.rollout.nodes.fleet import Fleet

log = logging.getLogger(__name__)

#: Seconds before a process that exited is restarted: at first, and at most.
_AGAIN_S, _AGAIN_AT_MOST_S = 0.5, 30.0
#: Seconds that a process must run before the pause is reset to the first value.
_LIVED_S = 60.0
#: Nice value of the processes and their sandboxes: on a busy machine they yield to the service, which answers
#: trainers, and to a model server beside it.
_NICE = 10
_BOOT = f"import sys; from {__name__} import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class _Part:
    """Configuration of one process, sent as a pickle over its standard input, because it has secrets."""

    settings: Settings
    head: str
    token: str
    name: str
    api_key: str | None


@asynccontextmanager
async def processes(settings: Settings, fleet: Fleet, head: str, token: str) -> AsyncIterator[None]:
    """Keep `nodes.processes` processes running while the block runs.

    Args:
        settings: of the service; the processes share its pools evenly.
        fleet: that the processes join; it is closed on leaving.
        head: address of the fleet, HOST:PORT.
        token: of the fleet.

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
        await fleet.aclose()  # asks the nodes that joined to stop
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


def share(settings: Settings, index: int) -> Settings:
    """Return one process's settings: its share of each limit of the machine.

    Args:
        index: of the process, from 0. If a limit does not divide evenly, the first processes get one more.
    """
    count = settings.nodes.processes

    def part(number: int) -> int:
        return number // count + (index < number % count)

    service = settings.service
    pools = {name: max(1, part(getattr(service, name))) for name in ("init", "run", "eval")}
    if service.max_jobs_with_sandbox is not None:
        pools["max_jobs_with_sandbox"] = max(1, part(service.max_jobs_with_sandbox))
    return settings.model_copy(
        update={
            "server": ServerSettings(),
            "nodes": NodeSettings(),
            "service": service.model_copy(update={**pools, "store": None}),
            "sandbox": settings.sandbox.model_copy(
                update={"warm_pool_size": part(settings.sandbox.warm_pool_size)}
            ),
        }
    )


async def _keep(part: _Part) -> None:
    """Run a process, restarting it on exit, until cancelled; then wait for it to exit."""
    again_s = _AGAIN_S
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            # A Ctrl-C in the terminal goes to the service, which then stops its processes in order.
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
        log.error("process %s exited (%s); another one starts in %g s", part.name, code, again_s)
        await asyncio.sleep(again_s)
        again_s = min(again_s * 2, _AGAIN_AT_MOST_S)


async def _ended(process: asyncio.subprocess.Process, part: _Part) -> None:
    """Wait for a process that was asked to stop or lost its service; kill it after a timeout."""
    try:
        async with asyncio.timeout(part.settings.service.close_s):
            await process.wait()
    except TimeoutError:
        log.error("process %s does not end, and is killed", part.name)
        process.kill()
        await process.wait()


def main() -> int:
    """Run one of the processes."""
    part: _Part = pickle.load(sys.stdin.buffer)  # written by the service, over a private pipe
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
