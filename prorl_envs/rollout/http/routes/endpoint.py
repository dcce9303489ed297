"""Model endpoints for agents outside of the service's sandboxes, each with a key for one episode."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.rollout.api.interactive import EndpointView
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.service.service import RolloutService

#: Path prefix of the endpoints of all episodes; the key selects the episode.
PREFIX = "/agent"


def add_endpoint(app: FastAPI, service: RolloutService) -> None:
    """Add the route that opens endpoints, and the endpoints themselves."""

    @app.post("/v1/episodes/{episode_id:path}/endpoint")
    async def open_endpoint(episode_id: str, request: Request) -> EndpointView:
        """Open a model endpoint for the caller's agent. It supports OpenAI Chat Completions, OpenAI Responses
        and Anthropic Messages. Its answers are recorded as the episode's tokens."""
        model = await service.episodes.endpoint(episode_id)
        base = f"{str(request.base_url).rstrip('/')}{PREFIX}"
        return EndpointView(key=model.key, anthropic_base_url=base, openai_base_url=f"{base}/v1")

    app.add_middleware(EndpointMiddleware, service=service)


class EndpointMiddleware:
    """Middleware that answers requests below `PREFIX`, which contain an endpoint key instead of a token. It
    must be the outermost middleware.

    Args:
        app: answers all other requests.
        service: the service with the episodes.
    """

    def __init__(self, app: ASGIApp, service: RolloutService) -> None:
        self._app = app
        self._endpoints = EndpointApp(service.episodes.model, prefix=PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        is_endpoint = scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/")
        await (self._endpoints if is_endpoint else self._app)(scope, receive, send)
