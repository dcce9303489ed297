"""Routes of interactive episodes."""

from typing import Annotated

from fastapi import Body, FastAPI, Query, Response

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeView, StepRequest
from prorl_envs.rollout.api.views import Health
from prorl_envs.rollout.http.auth import CurrentCaller
from prorl_envs.rollout.http.routes.results import json_response
from prorl_envs.rollout.service.service import RolloutService


def add_episodes(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes of episodes that a caller drives, which start with `/v1/episodes`."""
    max_s = settings.max_wait_s
    Wait = Annotated[float, Query(ge=0, le=max_s, allow_inf_nan=False, description="Seconds to wait.")]

    @app.post("/v1/episodes", response_model=EpisodeView)
    async def start_episode(body: EpisodeRequest, caller: CurrentCaller, wait_s: Wait = max_s) -> Response:
        """Start an episode that the caller drives. It does not survive the service, and is closed after
        `idle_s` seconds without a request."""
        caller.check_ids(body.id)
        return json_response(await service.start_episode(body, wait_s=wait_s, quota=caller.quota))

    @app.get("/v1/episodes/{episode_id:path}", response_model=EpisodeView)
    async def get_episode(episode_id: str, wait_s: Wait = 0.0) -> Response:
        """Return the state of an episode. Waits up to `wait_s` seconds for a running operation."""
        return json_response(await service.episodes.view(episode_id, wait_s=wait_s))

    @app.post("/v1/episodes/{episode_id:path}/run", response_model=EpisodeView)
    async def run_episode(
        episode_id: str, body: Annotated[StepRequest, Body()], wait_s: Wait = max_s
    ) -> Response:
        """Run a step: `tool_calls`; or `ids`, an answer that the caller's model sampled; or `agent`, which
        runs the service's own agent loop."""
        return json_response(await service.episodes.step(episode_id, body, wait_s=wait_s))

    @app.post("/v1/episodes/{episode_id:path}/eval", response_model=EpisodeView)
    async def evaluate_episode(episode_id: str, wait_s: Wait = max_s) -> Response:
        """Grade an episode, and close its sandbox."""
        return json_response(await service.episodes.evaluate(episode_id, wait_s=wait_s))

    @app.delete("/v1/episodes/{episode_id:path}")
    async def close_episode(episode_id: str) -> Health:
        """Close an episode in any state. Its sandbox is closed when this route answers."""
        await service.episodes.close(episode_id)
        return Health(status="ok")
