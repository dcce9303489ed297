"""Episodes step by step over HTTP."""

from typing import Annotated

from fastapi import Body, FastAPI, Query, Response

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.access import TheCaller
from prorl_envs.rollout.episode_types import EpisodeRequest, EpisodeView, StepRequest
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.views import Health


def add_episodes(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes."""
    most = settings.max_wait_s
    Wait = Annotated[float, Query(ge=0, le=most, allow_inf_nan=False, description="Seconds to wait for it.")]

    @app.post("/v1/episodes", response_model=EpisodeView)
    async def start_episode(body: EpisodeRequest, caller: TheCaller, wait_s: Wait = most) -> Response:
        """Begin an episode that the caller drives. Nothing of it outlives the service, and it ends when
        nobody asks for it for `idle_s` seconds."""
        caller.check_ids(body.id)
        return _json(await service.start_episode(body, wait_s=wait_s, quota=caller.quota))

    @app.get("/v1/episodes/{episode_id:path}", response_model=EpisodeView)
    async def get_episode(episode_id: str, wait_s: Wait = 0.0) -> Response:
        """Where an episode is; waits for what is at work on it."""
        return _json(await service.episodes.view(episode_id, wait_s=wait_s))

    @app.post("/v1/episodes/{episode_id:path}/run", response_model=EpisodeView)
    async def run_episode(
        episode_id: str, body: Annotated[StepRequest, Body()], wait_s: Wait = most
    ) -> Response:
        """Take a step: `tool_calls`, or `ids` that the caller's model sampled, or `agent`, with which the
        service's own loop takes over."""
        return _json(await service.episodes.step(episode_id, body, wait_s=wait_s))

    @app.post("/v1/episodes/{episode_id:path}/eval", response_model=EpisodeView)
    async def evaluate_episode(episode_id: str, wait_s: Wait = most) -> Response:
        """Grade an episode, and close its sandbox."""
        return _json(await service.episodes.evaluate(episode_id, wait_s=wait_s))

    @app.delete("/v1/episodes/{episode_id:path}")
    async def close_episode(episode_id: str) -> Health:
        """End an episode wherever it is. Its sandbox is closed when this answers."""
        await service.episodes.close(episode_id)
        return Health(status="ok")


def _json(view: EpisodeView) -> Response:
    """Serialised once: it may hold a long trajectory."""
    return Response(view.model_dump_json(), media_type="application/json")
