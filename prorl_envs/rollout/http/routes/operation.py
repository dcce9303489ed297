"""Routes of the operator: pause, resume and drain a service, its model servers and nodes."""

from typing import Annotated

from fastapi import Body, FastAPI, Path, Query

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.types import WireModel
from prorl_envs.rollout.api.views import (
    ModelServerList,
    ModelServerRequest,
    NodeList,
    Pause,
    PauseRequest,
    PauseView,
    ResumeRequest,
    StatusView,
)
from prorl_envs.rollout.nodes.fleet import Fleet
from prorl_envs.rollout.service.service import RolloutService

_DEFAULT_PAUSE = PauseRequest()
_DEFAULT_RESUME = ResumeRequest()

type _NodeName = Annotated[str, Path(max_length=200)]


class ServicePauseRequest(WireModel):
    """Request to pause a service.

    Args:
        mode: `hold`: no stage starts; a running stage finishes, and its job then waits with its sandbox.
            `finish`: no INIT starts; jobs that have started run to completion.
    """

    mode: Pause = Pause.HOLD


def add_operation(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes."""
    max_wait_s, servers = settings.max_wait_s, service.model_servers
    type Wait = Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)]

    @app.post("/v1/pause")
    async def pause(body: ServicePauseRequest | None = None) -> StatusView:
        """Accept groups, but start no stages, until `resume` or a restart. Deadlines exclude this time."""
        service.pause((body or ServicePauseRequest()).mode)
        return service.status()

    @app.post("/v1/resume")
    async def resume() -> StatusView:
        """Resume after a pause or a drain."""
        service.resume()
        return service.status()

    @app.post("/v1/drain")
    async def drain(
        wait_s: Wait = 0.0,
    ) -> StatusView:
        """Accept no more work and finish the accepted jobs. Waits up to `wait_s` seconds for them; all are
        finished when `unfinished` is 0. Lasts until `resume`."""
        await service.drain(wait_s)
        return service.status()

    @app.get("/v1/model_servers")
    async def get_model_servers() -> ModelServerList:
        """Return the model servers in use."""
        return servers.all()

    @app.post("/v1/model_servers")
    async def add_model_server(body: ModelServerRequest) -> ModelServerList:
        """Add a model server for new rollouts."""
        return await servers.add(body)

    @app.delete("/v1/model_servers")
    async def remove_model_server(
        url: Annotated[str, Query(max_length=2000)],
        wait_s: Wait = 0.0,
    ) -> ModelServerList:
        """Remove a model server. It receives no more turns, and is removed once its turns in flight have
        finished. Waits up to `wait_s` seconds for them. Repeat the request to wait longer."""
        return await servers.remove(url, wait_s)

    @app.post("/v1/model_servers/pause")
    async def pause_model_servers(
        body: Annotated[PauseRequest, Body()] = _DEFAULT_PAUSE,
    ) -> PauseView:
        """Hold turns during a weight update: no turn starts, and held turns do not fail. Repeat the request
        to wait longer for calls in flight."""
        return await servers.pause(body.model_copy(update={"wait_s": min(body.wait_s, max_wait_s)}))

    @app.post("/v1/model_servers/resume")
    async def resume_model_servers(
        body: Annotated[ResumeRequest, Body()] = _DEFAULT_RESUME,
    ) -> PauseView:
        """Let held turns continue, with the given weight version."""
        return await servers.resume(body)

    def fleet() -> Fleet:
        if service.fleet is None:
            raise NotFound("this service has no nodes", hint="set nodes.ray")
        return service.fleet

    def listed() -> NodeList:
        return NodeList(nodes=service.fleet.views() if service.fleet is not None else [])

    @app.get("/v1/nodes")
    async def get_nodes() -> NodeList:
        """Return the nodes that run jobs beside the service's own machine, including lost nodes."""
        return listed()

    @app.post("/v1/nodes/{name}/drain")
    async def drain_node(name: _NodeName) -> NodeList:
        """Stop sending jobs to a node. It finishes its jobs, and stays connected until it is stopped."""
        fleet().drain(name)
        return listed()

    @app.post("/v1/nodes/{name}/resume")
    async def resume_node(name: _NodeName) -> NodeList:
        """Resume sending jobs to a node."""
        fleet().undrain(name)
        return listed()
