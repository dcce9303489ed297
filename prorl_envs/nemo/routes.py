"""Separation of an agent's own requests from the tool calls of its model. Independent of NeMo Gym.

NeMo Gym's agents post a tool call to the route that the model names, with the same cookies as their own
requests (`responses_api_agents/simple_agent/app.py` of NeMo Gym 0.4). So a model can name a server route,
such as `verify`. The agent's own requests carry the task row of the episode, which the model never sees.
"""

import json
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import task_row
from prorl_envs.nemo.sessions import Sessions

type CallTool = Callable[[Request, str], Awaitable[Response]]


def separate_tool_calls(
    app: FastAPI,
    *,
    sessions: Callable[[], Sessions],
    session_id: Callable[[Request], str],
    call_tool: CallTool,
) -> None:
    """Pass every POST request that is not the agent's own to `call_tool`, with the path as the tool's name.

    A request to one of the routes that `app` has now is the agent's own if its session has no episode yet, or
    if it carries the episode's task row. Call this after all other routes were added.

    Args:
        app: the server.
        sessions: returns the sessions, once the server has started.
        session_id: returns the session id of a request.
        call_tool: runs a tool call; its body holds the arguments.
    """

    def guarded(inner: ASGIApp) -> ASGIApp:
        async def choose(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive)
            body = await request.body()
            if sessions().may_belong(session_id(request), _row(body)):
                return await inner(scope, _repeated(body, receive), send)
            response = await call_tool(request, request.path_params.get("tool", request.url.path[1:]))
            await response(scope, receive, send)

        return choose

    for route in app.routes:
        if isinstance(route, Route) and "POST" in (route.methods or ()):
            route.app = guarded(route.app)

    async def other(request: Request, tool: str) -> Response:
        return await call_tool(request, tool)

    app.add_api_route("/{tool:path}", other, methods=["POST"], response_model=None)


def _row(body: bytes) -> object:
    try:
        return task_row(json.loads(body))
    except (ValueError, RecursionError, AttributeError, InputError):
        return None


def _repeated(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` whose first message is the body, which was already read."""
    first = True

    async def repeat() -> Message:
        nonlocal first
        if not first:
            return await receive()
        first = False
        return {"type": "http.request", "body": body, "more_body": False}

    return repeat
