"""Routes to pause, resume and drain a service."""

from typing import Annotated

from fastapi import FastAPI, Query

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.types import WireModel
from prorl_envs.rollout.api.views import Pause, StatusView
from prorl_envs.rollout.service.service import RolloutService


class ServicePauseRequest(WireModel):
    """Request to pause a service.

    Args:
        mode: `hold`: no stage starts; a running stage finishes, and its job then waits with its sandbox.
            `finish`: no INIT starts; jobs that have started run to completion.
    """

    mode: Pause = Pause.HOLD


def add_operation(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes that pause, resume and drain the service."""
    max_wait_s = settings.max_wait_s

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
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
    ) -> StatusView:
        """Accept no more work and finish the accepted jobs. Waits up to `wait_s` seconds for them; all are
        finished when `unfinished` is 0. Lasts until `resume`."""
        await service.drain(wait_s)
        return service.status()
