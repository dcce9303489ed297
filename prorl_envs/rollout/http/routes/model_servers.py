"""Routes of the model servers."""

from typing import Annotated

from fastapi import Body, FastAPI, Query

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.views import (
    ModelServerList,
    ModelServerRequest,
    PauseRequest,
    PauseView,
    ResumeRequest,
)
from prorl_envs.rollout.service.service import RolloutService

_DEFAULT_PAUSE = PauseRequest()
_DEFAULT_RESUME = ResumeRequest()


def add_models(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes that list, add, remove, pause and resume model servers."""
    servers = service.model_servers
    max_wait_s = settings.max_wait_s

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
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
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
