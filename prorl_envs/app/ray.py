"""Nodes on the machines of a Ray cluster: each is a Ray actor, and Ray transports the calls.

Only this module imports Ray (docs/decisions/nodes.md).
"""

import asyncio
import functools
import ipaddress
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from prorl_envs.app.compose import Model, absolute_tokenizer, node, servers_of
from prorl_envs.app.logs import exporting_traces, set_up_logging
from prorl_envs.app.tuning import settled
from prorl_envs.catalog import Catalog
from prorl_envs.config import NodeSettings, ServerSettings, ServiceSettings, Settings
from prorl_envs.errors import InputError, NodeLost, ProrlError
from prorl_envs.extras import install_extras
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.nodes.messages import Terms
from prorl_envs.rollout.nodes.worker import NodeResources, NodeWorker, fingerprint
from prorl_envs.rollout.scheduling.placement import StageLimits

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise InputError("Ray is not installed", hint=install_extras("ray")) from error

log = logging.getLogger(__name__)

#: Seconds between two checks for new machines, and before a new actor on a machine that cannot be a node.
_POLL_S, _RETRY_S = 2.0, 30.0
#: Seconds between the end of an actor's work and its exit, in which its last answer is sent.
_EXIT_DELAY_S = 2.0
#: Timeout of the check that a cluster refuses clients without a token.
_PROBE_S = 60.0


@asynccontextmanager
async def fleet_of(
    settings: Settings, model: Model, pool: ModelPool, environments: Sequence[str]
) -> AsyncIterator[Fleet]:
    """Open the fleet of a service: join the Ray cluster, and keep actors running on its machines.

    Args:
        settings: all settings.
        model: the model of the service.
        pool: the model servers.
        environments: names of the environments that each node must have.

    Raises:
        InputError: the cluster cannot be reached, or is open to other machines without a token.
    """
    nodes, service = settings.nodes, settings.service
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
    async with _cluster(nodes.ray or "auto"):
        supervisor = _Supervisor(settings, fleet)
        supervising = asyncio.create_task(supervisor.run())
        try:
            yield fleet
        finally:
            supervising.cancel()
            await fleet.aclose()
            await supervisor.aclose()


@asynccontextmanager
async def _cluster(address: str) -> AsyncIterator[None]:
    """Join a Ray cluster during the block, unless this process has already joined a cluster.

    Raises:
        InputError: the cluster cannot be reached, or is open to other machines without a token.
    """
    joined_here = not ray.is_initialized()
    if joined_here:
        try:
            await asyncio.to_thread(_join, address)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            raise InputError(
                f"no Ray cluster at {address!r}: {error}",
                hint="run `ray start --head` here, and set nodes.ray: auto; with token authentication, set "
                "RAY_AUTH_MODE=token and the token",
            ) from error
    try:
        await asyncio.to_thread(require_authentication, ray.get_runtime_context().gcs_address)
        yield
    finally:
        if joined_here:
            await asyncio.to_thread(ray.shutdown)


def _join(address: str) -> None:
    ray.init(address, namespace="prorl-envs", log_to_driver=False, logging_level=logging.WARNING)


def require_authentication(address: str) -> None:
    """Refuse a Ray cluster that other machines can reach and that accepts calls without a token. Blocks.

    Args:
        address: address of the cluster, HOST:PORT.

    Raises:
        InputError: the cluster is refused.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback or not _accepts_without_token(address):
        return
    raise InputError(
        f"the Ray cluster at {address} has no token authentication: any host that reaches it can run code",
        hint="start Ray and the service with RAY_AUTH_MODE=token (`ray get-auth-token --generate`)",
    )


def _accepts_without_token(address: str) -> bool:
    """Return whether a cluster answers a client without a token. The client is another process, because this
    process already has the token."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(
            status,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # unknown, so treated as open
    return done.returncode == 0


def limits_of(
    settings: ServiceSettings, run: int | None = None, *, actors: int = 1, index: int = 0
) -> StageLimits:
    """Return the maximum concurrent jobs of one actor, by stage.

    Args:
        settings: settings of the service, with the pools of a machine.
        run: maximum jobs in RUN on the machine, instead of the setting; the other pools scale by the same
            factor.
        actors: number of actors on the machine, which share its pools; the first actors get the remainder.
        index: index of the actor, from 0.
    """
    limits = StageLimits.of_settings(settings)

    def share(number: int) -> int:
        machine = number if run is None else round(number * run / settings.run)
        return max(1, machine // actors + (index < machine % actors))

    return StageLimits(
        init=share(limits.init),
        run=share(limits.run),
        eval=share(limits.eval),
        max_jobs_with_sandbox=share(limits.max_jobs_with_sandbox),
        attempts=limits.attempts,
    )


class NodeActor(NodeWorker):
    """Ray actor that is a node.

    Args:
        settings: settings of the service.
        limits: concurrency limits of this actor.
        api_key: bearer token of the model servers.
    """

    def __init__(self, settings: Settings, limits: StageLimits, api_key: str | None) -> None:
        super().__init__(self._resources_for, limits)
        self._settings = settings
        self._api_key = api_key
        self._leaving: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def _resources_for(self, terms: Terms) -> AsyncIterator[NodeResources]:
        settings = self._settings
        set_up_logging(settings.log)
        self._leaving = asyncio.create_task(self._exit())
        folder = settings.model.tokenizer or terms.tokenizer
        if not folder:
            raise InputError(
                "the service names no tokenizer", hint="set model.tokenizer to a folder or Hub name"
            )
        renderer = await asyncio.to_thread(load_renderer, str(folder), tool_format=terms.tool_format)
        model = Model(
            servers=(),
            renderer=renderer,
            name=terms.model or None,
            api_key=self._api_key,
            protocol=terms.protocol,
            ca_file=settings.model.ca_file,
        )
        with exporting_traces():
            async with node(settings) as opened:
                offered = Catalog.of(settings)
                settled()
                yield NodeResources(opened, offered, renderer, servers_of(model).connect)

    async def _exit(self) -> None:
        """Exit the process when everything is closed: the service that would kill it may be gone."""
        await self.stopped.wait()
        await asyncio.sleep(_EXIT_DELAY_S)
        os._exit(0)


class _RayNode:
    """`NodeWorker` in an actor: each method calls the actor's method of the same name."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return functools.partial(self._call, method)

    async def _call(self, method: str, *args: object) -> Any:
        """Call a method of the actor.

        Raises:
            ProrlError: the actor's method raised it.
            NodeLost: the actor is gone, or its method raised another error.
        """
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, ProrlError):
                raise error.cause from None
            raise NodeLost(f"its method {method} failed: {error.cause!r}") from error
        except RayError as error:
            raise NodeLost(str(error).strip().partition("\n")[0]) from error


class _Supervisor:
    """Keeps actors running on the machines of the cluster, by Ray node id and index."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._serving: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._own_machine = ray.get_runtime_context().get_node_id()

    async def run(self) -> None:
        """Start the actors that the machines lack, until cancelled."""
        while True:
            for machine in await asyncio.to_thread(ray.nodes):
                for index in range(self._settings.nodes.actors):
                    slot = machine["NodeID"], index
                    if machine["Alive"] and slot not in self._serving and self._needs_actors(machine):
                        self._serving[slot] = asyncio.create_task(self._serve(machine, index))
            await asyncio.sleep(_POLL_S)

    async def aclose(self) -> None:
        """Stop all actors. Close the fleet first."""
        for task in self._serving.values():
            task.cancel()
        await asyncio.gather(*self._serving.values(), return_exceptions=True)

    def _needs_actors(self, machine: Mapping[str, Any]) -> bool:
        resource = self._settings.nodes.resource
        if resource is None:
            return bool(machine["NodeID"] != self._own_machine)
        return bool(machine["Resources"].get(resource, 0) >= self._settings.nodes.actors)

    async def _serve(self, machine: Mapping[str, Any], index: int) -> None:
        """Run an actor as a node until it is lost; then wait before another actor may start in its place."""
        nodes, key = self._settings.nodes, machine["NodeID"]
        name = f"{machine['NodeManagerHostname']}-{key[:6]}" + (f"-{index + 1}" if nodes.actors > 1 else "")
        delay_s = _RETRY_S
        actor = self._start(machine, index)
        try:
            await self._fleet.serve(name, cast(NodeWorker, _RayNode(actor)))
        except NodeLost as error:
            log.warning("node %s: %s", name, error)
            delay_s = _POLL_S
        except ProrlError as error:
            log.error("machine %s cannot be a node: %s", name, error)
        finally:
            ray.kill(actor)
        await asyncio.sleep(delay_s)
        del self._serving[key, index]

    def _start(self, machine: Mapping[str, Any], index: int) -> Any:
        settings, nodes = self._settings, self._settings.nodes
        run = int(machine["Resources"][nodes.resource]) if nodes.resource is not None else None
        limits = limits_of(settings.service, run, actors=nodes.actors, index=index)
        warm = settings.sandbox.warm_pool_size
        share = warm // nodes.actors + (index < warm % nodes.actors)
        given = settings.model_copy(
            update={
                "server": ServerSettings(),
                "nodes": NodeSettings(),
                "service": settings.service.model_copy(update={"store": None}),
                "sandbox": settings.sandbox.model_copy(update={"warm_pool_size": share}),
            }
        )
        options: dict[str, Any] = {
            "num_cpus": nodes.cpus,
            "resources": {nodes.resource: limits.run} if nodes.resource is not None else None,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False),
            "max_restarts": 0,  # a restarted actor would be another node, without the attempts
            "max_task_retries": 0,  # a stage must not run twice
            "max_concurrency": 8 * limits.max_jobs_with_sandbox + 64,
        }
        api_key = os.environ.get("OPENAI_API_KEY") or None
        return ray.remote(NodeActor).options(**options).remote(given, limits, api_key)
