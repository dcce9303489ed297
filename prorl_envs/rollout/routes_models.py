"""The routes of the model servers."""

from typing import Annotated

from fastapi import Body, FastAPI, Query

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.views import (
    ModelServerList,
    ModelServerRequest,
    PauseRequest,
    PauseView,
    ResumeRequest,
)

_DEFAULT_PAUSE = PauseRequest()
_DEFAULT_RESUME = ResumeRequest()


def add_models(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add, remove, watch, pause and resume the servers of a service."""
    servers = service.model_servers
    max_wait_s = settings.max_wait_s

    @app.get("/v1/model_servers")
    async def get_model_servers() -> ModelServerList:
        """The model servers in use."""
        return servers.all()

    @app.post("/v1/model_servers")
    async def add_model_server(body: ModelServerRequest) -> ModelServerList:
        """Offer a further model server to new rollouts."""
        return await servers.add(body)

    @app.delete("/v1/model_servers")
    async def remove_model_server(
        url: Annotated[str, Query(max_length=2000)],
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
    ) -> ModelServerList:
        """Take a model server away: it gets no more turns, and is gone once those in flight have ended.
        `wait_s` waits for that; asked again for a server that is draining, it waits on."""
        return await servers.remove(url, wait_s)

    @app.post("/v1/model_servers/pause")
    async def pause_model_servers(
        body: Annotated[PauseRequest, Body()] = _DEFAULT_PAUSE,
    ) -> PauseView:
        """Hold turns while weights change: none begins, and none fails for it. Asked again, it waits on."""
        return await servers.pause(body.model_copy(update={"wait_s": min(body.wait_s, max_wait_s)}))

    @app.post("/v1/model_servers/resume")
    async def resume_model_servers(
        body: Annotated[ResumeRequest, Body()] = _DEFAULT_RESUME,
    ) -> PauseView:
        """Let turns go on, with the weights named."""
        return await servers.resume(body)
