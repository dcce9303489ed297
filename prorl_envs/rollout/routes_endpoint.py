"""A model endpoint for agents that run outside of our sandboxes: an episode's tokens, by its own key."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.episode_types import EndpointView
from prorl_envs.rollout.service import RolloutService

#: Where the endpoints of all episodes are; the key says which one is meant.
PREFIX = "/agent"


def add_endpoint(app: FastAPI, service: RolloutService) -> None:
    """Add the route, and the endpoints behind keys."""

    @app.post("/v1/episodes/{episode_id:path}/endpoint")
    async def open_endpoint(episode_id: str, request: Request) -> EndpointView:
        """A model endpoint for an agent of the caller's: OpenAI Chat Completions, OpenAI Responses and
        Anthropic Messages. What it answers is the episode's tokens."""
        model = await service.episodes.endpoint(episode_id)
        base = f"{str(request.base_url).rstrip('/')}{PREFIX}"
        return EndpointView(key=model.key, anthropic_base_url=base, openai_base_url=f"{base}/v1")

    app.add_middleware(EndpointDoor, service=service)


class EndpointDoor:
    """Stands in front of all else: a request below `PREFIX` has a key of its own, and no token.

    Args:
        app: what answers the rest.
        service: has the episodes.
    """

    def __init__(self, app: ASGIApp, service: RolloutService) -> None:
        self._app = app
        self._endpoints = EndpointApp(service.episodes.model, prefix=PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        ours = scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/")
        await (self._endpoints if ours else self._app)(scope, receive, send)
