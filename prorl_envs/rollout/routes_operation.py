"""Pause, resume and drain over HTTP."""

from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.scheduler import Pause
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.views import StatusView


class PauseRequest(BaseModel):
    """What to hold back.

    Args:
        mode: `hold`, every stage: what runs goes to the end of its stage and waits there, with its sandbox;
            or `finish`, INIT alone: what has begun goes to its result.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Pause = Pause.HOLD


def add_operation(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes."""
    max_wait_s = settings.max_wait_s

    @app.post("/v1/pause")
    async def pause(body: PauseRequest | None = None) -> StatusView:
        """Go on accepting, and start less. Waiting counts against no deadline. Ends with `resume`, or with
        the service."""
        service.pause((body or PauseRequest()).mode)
        return service.status()

    @app.post("/v1/resume")
    async def resume() -> StatusView:
        """End a pause or a drain."""
        service.resume()
        return service.status()

    @app.post("/v1/drain")
    async def drain(
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
    ) -> StatusView:
        """Accept nothing more and finish what is there, waiting up to `wait_s` seconds for that. It is done
        when `unfinished` is 0. Ends with `resume`."""
        await service.drain(wait_s)
        return service.status()
