"""Separation of an agent's own requests from the tool calls of its model. Independent of NeMo Gym.

NeMo Gym's agents post a tool call to the route that the model names, with the same cookies as their own
requests (`responses_api_agents/simple_agent/app.py` of NeMo Gym 0.4). So a model can name a server route,
such as `verify`. The agent's own requests carry the task row of the episode, which the model never sees.
"""

import json
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import task_row
from prorl_envs.nemo.sessions import Sessions

#: Route by which an environment server of NeMo Gym (0.7) closes a session, with its id.
CLOSE = "/close_session"

type CallTool = Callable[[Request, str], Awaitable[Response]]


def separate_tool_calls(
    app: FastAPI,
    *,
    sessions: Sessions,
    session_id: Callable[[Request], str],
    call_tool: CallTool,
) -> None:
    """Pass every POST request that is not the agent's own to `call_tool`, with the path as the tool's name.

    A request to one of the routes that `app` has now is the agent's own if its session has no episode yet, or
    if it carries the episode's task row; a close, if its session has no open episode, or is the one to close.
    Call this after all other routes were added. NeMo Gym may replace them later (0.7 does, for MCP).

    Args:
        app: the server.
        sessions: the server's sessions.
        session_id: returns the session id of a request.
        call_tool: runs a tool call; its body holds the arguments.
    """
    own = {route.path for route in app.routes if isinstance(route, Route) and "POST" in (route.methods or ())}
    routed = app.router.middleware_stack

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in own:
            return await routed(scope, receive, send)
        request = Request(scope, receive)
        body = await request.body()
        if _is_own(sessions, session_id(request), scope["path"], body):
            return await routed(scope, _repeated(body, receive), send)
        response = await call_tool(request, scope["path"][1:])
        await response(scope, receive, send)

    async def other(request: Request, tool: str) -> Response:
        return await call_tool(request, tool)

    app.add_api_route("/{tool:path}", other, methods=["POST"], response_model=None)
    app.router.middleware_stack = choose


def _is_own(sessions: Sessions, session_id: str, path: str, body: bytes) -> bool:
    try:
        content = json.loads(body)
        if path == CLOSE:
            return sessions.may_close(session_id, content.get("resources_session_id"))
        row: object = task_row(content)
    except (ValueError, RecursionError, AttributeError, InputError):
        row = None
    return sessions.may_belong(session_id, row)


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
