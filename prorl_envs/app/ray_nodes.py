"""Machines of a Ray cluster as nodes: one actor on each, placed and restarted by Ray.

Ray starts, restarts and stops the processes, and reports which machines join and leave. Messages between the
head and a node do not go through Ray, but through the node's own connection (docs/decisions/nodes.md).
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prorl_envs.app.nodes import limits_of, work
from prorl_envs.config import ServerSettings, Settings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.extras import install_extras
from prorl_envs.rollout.nodes.channel import ChannelClosed
from prorl_envs.rollout.nodes.fleet import Fleet

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise InputError("Ray is not installed", hint=install_extras("ray")) from error

log = logging.getLogger(__name__)

#: Seconds between two checks for new machines, and after a node that could not work.
_LOOK_S, _AGAIN_S = 2.0, 30.0


class NodeActor:
    """Ray actor that runs a node."""

    def work(
        self, settings: Settings, head: str, token: str, name: str, run: int | None, api_key: str
    ) -> str:
        """Work as a node until the service closes the connection.

        Args:
            settings: the service's.
            head: address of the fleet, HOST:PORT; `token`: of the fleet.
            run: episodes in RUN at once; None takes the settings'.

        Returns:
            the reason why it could not be a node, or "" after a normal end.
        """
        limits = limits_of(settings.service, run)
        working = work(settings, head, token, name=name, limits=limits, api_key=api_key or None)
        try:
            asyncio.run(working)
        except ChannelClosed as error:
            log.warning("%s", error)  # the service may come back
        except ProrlError as error:
            return str(error)
        return ""


@asynccontextmanager
async def ray_cluster(address: str) -> AsyncIterator[str]:
    """Join a Ray cluster while the block runs.

    Yields:
        This machine's address in it.

    Raises:
        InputError: the cluster cannot be reached.
    """
    ours = not ray.is_initialized()
    if ours:
        try:
            await asyncio.to_thread(_enter, address)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"no Ray cluster at {address!r}: {error}", hint="`ray start --head` here, and nodes.ray: auto"
            ) from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        if ours:
            await asyncio.to_thread(ray.shutdown)


def _enter(address: str) -> None:
    ray.init(address, namespace="prorl-envs", log_to_driver=False, logging_level=logging.WARNING)


@asynccontextmanager
async def ray_nodes(settings: Settings, fleet: Fleet, address: str, token: str) -> AsyncIterator[None]:
    """Keep an actor on every machine of the cluster while the block runs.

    Args:
        settings: of the service; every machine gets them without the HTTP server's and the store's.
        fleet: that the actors join; it is closed on leaving.
        address: of this machine; the actors connect to the fleet's port.
        token: of the fleet.
    """
    supervisor = _Supervisor(settings, f"{address}:{fleet.port}", token)
    looking = asyncio.create_task(supervisor.look())
    try:
        yield
    finally:
        looking.cancel()
        await fleet.aclose()
        await supervisor.aclose(settings.service.close_s)


class _Supervisor:
    """Actors by Ray node id."""

    def __init__(self, settings: Settings, head: str, token: str) -> None:
        service = settings.service.model_copy(update={"store": None})
        self._settings = settings.model_copy(update={"server": ServerSettings(), "service": service})
        self._head = head
        self._token = token
        self._actors: dict[str, Any] = {}
        self._watching: set[asyncio.Task[None]] = set()
        self._here = ray.get_runtime_context().get_node_id()

    async def look(self) -> None:
        """Start an actor on each machine that lacks one, until cancelled."""
        while True:
            for machine in await asyncio.to_thread(ray.nodes):
                if machine["Alive"] and machine["NodeID"] not in self._actors and self._wanted(machine):
                    self._start(machine)
            await asyncio.sleep(_LOOK_S)

    async def aclose(self, wait_s: float) -> None:
        """Wait for the actors to finish; kill those still running."""
        if self._watching:
            await asyncio.wait(set(self._watching), timeout=wait_s)
        for task in self._watching:
            task.cancel()
        for actor in self._actors.values():
            ray.kill(actor)

    def _wanted(self, machine: Mapping[str, Any]) -> bool:
        resource = self._settings.nodes.resource
        if resource is None:
            return bool(machine["NodeID"] != self._here)
        return bool(machine["Resources"].get(resource, 0) >= 1)

    def _start(self, machine: Mapping[str, Any]) -> None:
        nodes, key = self._settings.nodes, machine["NodeID"]
        run = int(machine["Resources"][nodes.resource]) if nodes.resource is not None else None
        options: dict[str, Any] = {
            "num_cpus": nodes.cpus,
            "resources": {nodes.resource: run} if nodes.resource is not None else None,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(key, soft=False),
            "max_restarts": -1,
            "max_task_retries": -1,  # Ray restarts a process that dies and repeats its call
        }
        actor: Any = ray.remote(NodeActor).options(**options).remote()
        self._actors[key] = actor
        name = f"{machine['NodeManagerHostname']}-{key[:6]}"
        api_key = os.environ.get("OPENAI_API_KEY", "")
        doing = actor.work.remote(self._settings, self._head, self._token, name, run, api_key)
        task = asyncio.create_task(self._watch(key, name, doing))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, key: str, name: str, doing: Any) -> None:
        """Wait for an actor's call to return, then kill it, so that `look` starts another."""
        again_s = _LOOK_S
        try:
            if problem := await asyncio.wrap_future(doing.future()):
                log.error("machine %s cannot be a node: %s", name, problem)
                again_s = _AGAIN_S
        except RayTaskError as error:
            log.error("machine %s cannot be a node: %s", name, error)
            again_s = _AGAIN_S
        except RayError as error:
            log.warning("machine %s is gone from the Ray cluster: %s", name, str(error).partition("\n")[0])
        await asyncio.sleep(again_s)
        ray.kill(self._actors.pop(key))
