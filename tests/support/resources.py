"""Small resources server with NeMo Gym's protocol over real HTTP, which misbehaves on request.

    desk = ResourcesDesk()
    async with desk.serving() as url:
        ...

The task is to count: a row has `start` and `expected`; the tools are `add` and `read`. The model's answer
must also contain the row's `say`.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from prorl_envs.rollout.http.server import answering

_COOKIE = "desk_session"

type Misbehaviour = Callable[[Request], Awaitable[Response]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "add",
        "description": "Add to the count.",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
        "strict": True,
    },
    {
        "type": "function",
        "name": "read",
        "description": "Read the count.",
        "parameters": None,
        "strict": True,
    },
]


def desk_row(
    start: int = 0, expected: int = 3, *, asked: str = "Count to three.", **more: Any
) -> dict[str, Any]:
    """Return a task row of the server."""
    params = {"input": [{"role": "user", "content": asked}], "tools": TOOLS}
    return {"responses_create_params": params, "start": start, "expected": expected, **more}


class ResourcesDesk:
    """Resources server; see the module.

    Attributes:
        instead: by route (`seed_session`, `verify`, a tool), replacement answers in order; afterwards the
            route works normally again. The last one of a list stays if `stays` is true.
        asked: requests, by route.
        counts: by session.
        verified: bodies of the verify requests.
        typed: ids of the open sessions, of a server that takes typed seeds; else None.
    """

    def __init__(self) -> None:
        self.instead: dict[str, list[Misbehaviour]] = {}
        self.asked: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.verified: list[dict[str, Any]] = []
        self.typed: list[str] | None = None  # of a server with typed seeds: its open sessions

    def misbehave(self, route: str, *answers: Misbehaviour, times: int = 1) -> None:
        """Replace the next requests of a route by `answers`, repeated `times` times."""
        self.instead.setdefault(route, []).extend(list(answers) * times)

    def app(self) -> Starlette:
        """Application of the server."""
        described = Route("/openapi.json", self._describe)
        return Starlette(routes=[described, Route("/{route:path}", self._answer, methods=["POST"])])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free loopback port; yields the base URL."""
        async with answering(self.app(), last_requests_s=0, log_level="critical") as url:
            yield url

    async def _describe(self, request: Request) -> Response:
        if waiting := self.instead.get("openapi.json"):
            return await waiting.pop(0)(request)
        fields = ["start"] if self.typed is None else ["resources_session_id", "task_data"]
        return JSONResponse({"components": {"schemas": {"Seed": {"properties": dict.fromkeys(fields)}}}})

    async def _answer(self, request: Request) -> Response:
        route = request.path_params["route"]
        self.asked[route] += 1
        if waiting := self.instead.get(route):
            return await waiting.pop(0)(request)
        match route:
            case "seed_session":
                return await self._seed(request)
            case "add" | "read":
                return await self._tool(request, route)
            case "verify":
                return await self._verify(request)
            case "close_session" if self.typed is not None:
                self.typed.remove((await request.json())["resources_session_id"])
                return JSONResponse({})
        return JSONResponse({"detail": "Not Found"}, status_code=404)

    async def _seed(self, request: Request) -> Response:
        body, session = await request.json(), request.cookies.get(_COOKIE) or uuid4().hex
        if self.typed is not None:
            session, body = body["resources_session_id"], body["task_data"]
            self.typed.append(session)
        self.counts.setdefault(session, body["start"])
        answer = JSONResponse({})
        answer.set_cookie(_COOKIE, session)
        return answer

    async def _tool(self, request: Request, route: str) -> Response:
        session, arguments = request.cookies[_COOKIE], await request.json()
        if route == "read":
            return JSONResponse({"count": self.counts[session]})
        if not isinstance(arguments.get("count"), int):
            return JSONResponse({"detail": "count: an integer is expected"}, status_code=422)
        self.counts[session] += arguments["count"]
        return JSONResponse({"success": True})

    async def _verify(self, request: Request) -> Response:
        body = await request.json()
        self.verified.append(body)
        count = self.counts[request.cookies[_COOKIE]]
        right = count == body["expected"] and body.get("say", "") in message_text(body["response"]["output"])
        return JSONResponse({**body, "reward": float(right), "count": count, "right": right})


def count_to_three(session: str, turn: int) -> Any:
    """Return the turns of a `ToyModel` that solve `desk_row()`; they are the same in every attempt."""
    one, two = ({"tool": "add", "arguments": {"count": count}} for count in (1, 2))
    return [[one], [two, {"tool": "read", "arguments": {}}], "It is three."][turn % 3]


def message_text(output: Sequence[dict[str, Any]]) -> str:
    """Return the text of a response's messages."""
    messages = [item for item in output if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def answers(body: bytes | str, status: int = 200, headers: Mapping[str, str] | None = None) -> Misbehaviour:
    """Return a handler with a fixed answer."""

    async def answer(request: Request) -> Response:
        return PlainTextResponse(body, status_code=status, headers=headers, media_type="application/json")

    return answer
