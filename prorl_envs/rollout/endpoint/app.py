"""Model endpoint over HTTP: the interfaces of three vendors, with one session per key.

This is a plain ASGI application, so a call costs a fraction of a millisecond. A web framework would not help,
since the vendors define the formats. The key is checked before the first byte of the body is read.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from prorl_envs.rollout.agent.agent_loop import run_in_thread_if_long
from prorl_envs.rollout.endpoint.anthropic import Messages
from prorl_envs.rollout.endpoint.chat import ChatCompletions
from prorl_envs.rollout.endpoint.incremental_parse import LiveAnswer
from prorl_envs.rollout.endpoint.responses import Responses
from prorl_envs.rollout.endpoint.session import EndpointLimits, ModelSession
from prorl_envs.rollout.endpoint.types import (
    AnswerStream,
    EndpointAnswer,
    EndpointRequest,
    RefusalReason,
    RequestRefused,
    Shape,
)

log = logging.getLogger(__name__)

_CHAT, _RESPONSES, _MESSAGES = ChatCompletions(), Responses(), Messages()
_SHAPES: Mapping[str, Shape] = {
    "/chat/completions": _CHAT,
    "/responses": _RESPONSES,
    "/messages": _MESSAGES,
    "/messages/count_tokens": _MESSAGES,
}
#: Minimum seconds between two events of a streamed answer. Tokens that arrive in between are sent together.
_MIN_EVENT_S = 0.02
#: Timeout in seconds for sending data to a client that does not read.
_SEND_TIMEOUT_S = 120.0


class _Gone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class EndpointApp:
    """ASGI application of the endpoint.

    Args:
        find: returns the session with a key, or None.
        model: name of the model in the list of models.
        prefix: prefix of all paths, without a trailing slash.
    """

    find: Callable[[str], ModelSession | None]
    model: str = "policy"
    prefix: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = _path(scope["path"].removeprefix(self.prefix))
        shape = _SHAPES.get(path, _CHAT)
        session = None
        try:
            session = self._session(scope)
            await self._serve(session, scope["method"], path, shape, receive, send)
        except RequestRefused as refused:
            if session is not None and refused.reason is not RefusalReason.ENDED:
                session.count_refused()
            await _respond(send, refused.status, shape.error(refused))
        except _Gone:
            pass

    def _session(self, scope: Scope) -> ModelSession:
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), bearer if kind.lower() == b"bearer" else b""]
        for key in keys:
            if key and (session := self.find(key.strip().decode("latin-1"))):
                return session
        raise RequestRefused(RefusalReason.KEY, "the key is unknown, or its rollout has ended")

    async def _serve(
        self, session: ModelSession, method: str, path: str, shape: Shape, receive: Receive, send: Send
    ) -> None:
        if method in ("GET", "HEAD"):
            await _respond(send, 200, self._get_response(path))
            return
        if method != "POST" or path not in _SHAPES:
            raise RequestRefused(RefusalReason.ROUTE, f"there is no {method} {path[:100]}")
        if session.reason is not None:
            raise RequestRefused(RefusalReason.ENDED, f"this rollout has ended: {session.reason}")
        data = await _body(receive, session.bounds)
        request = await run_in_thread_if_long(len(data), partial(shape.read, data))
        if path.endswith("/count_tokens"):
            await _respond(send, 200, {"input_tokens": session.count_tokens(request)})
            return
        closed = asyncio.create_task(_until_disconnect(receive))
        try:
            if request.stream:
                await _stream_answer(session, request, shape.stream(request, next(_numbers)), closed, send)
            else:
                answer = await _answer_unless(closed, asyncio.create_task(session.call(request)))
                await _respond(send, 200, shape.write(answer, request))
        finally:
            closed.cancel()

    def _get_response(self, path: str) -> dict[str, Any]:
        """Return the response to a GET request: the health, or the only model.

        Raises:
            RequestRefused: the path is unknown.
        """
        model = {
            "id": self.model,
            "object": "model",
            "type": "model",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "display_name": self.model,
            "owned_by": "prorl-envs",
        }
        if path in ("", "/", "/health"):
            return {"status": "ok"}
        if path == "/models":
            page = {"has_more": False, "first_id": self.model, "last_id": self.model}
            return {"object": "list", "data": [model], **page}
        if path.startswith("/models/"):
            return {**model, "id": path.removeprefix("/models/")[:200]}
        raise RequestRefused(RefusalReason.ROUTE, f"there is no GET {path[:100]}")


_numbers = itertools.count()


def _path(path: str) -> str:
    """Return the path without the prefix `/v1`, which only some clients send."""
    return path.removeprefix("/v1").rstrip("/")


async def _body(receive: Receive, bounds: EndpointLimits) -> bytes:
    """Return the body of a request.

    Raises:
        RequestRefused: the body is too large, or does not arrive in time.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(bounds.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                data += message.get("body", b"")
                if len(data) > bounds.body_bytes:
                    raise RequestRefused(
                        RefusalReason.SIZE, f"the body is larger than {bounds.body_bytes} bytes"
                    )
                if not message.get("more_body", False):
                    return bytes(data)
    except TimeoutError:
        raise RequestRefused(RefusalReason.INVALID, "the body did not arrive in time") from None


async def _until_disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_unless(closed: asyncio.Task[None], call: asyncio.Task[EndpointAnswer]) -> EndpointAnswer:
    """Return the answer of a call. If the client closes the connection before, cancel the call.

    Raises:
        RequestRefused: the call was refused, or the rollout has ended.
        _Gone: the client closed the connection.
    """
    try:
        await asyncio.wait({closed, call}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise _Gone
        if call.cancelled():
            raise RequestRefused(RefusalReason.ENDED, "this rollout has ended")
        return call.result()
    finally:
        await _stop_call(call)


async def _stream_answer(
    session: ModelSession,
    request: EndpointRequest,
    stream: AnswerStream,
    closed: asyncio.Task[None],
    send: Send,
) -> None:
    """Stream an answer. A refusal before the first event is sent as an ordinary error response."""
    live = LiveAnswer()
    call = asyncio.create_task(session.call(request, live))
    started = False

    async def send_events(data: bytes) -> None:
        nonlocal started
        if not started:
            started = True
            data = stream.begin() + data
            await _send(send, _start(200, b"text/event-stream"))
        if data:
            await _send(send, {"type": "http.response.body", "body": data, "more_body": True})

    try:
        while not call.done():
            changed = asyncio.create_task(live.changed.wait())
            try:
                await asyncio.wait({closed, call, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if closed.done():
                raise _Gone
            if not call.done():
                live.changed.clear()
                if any(new_text := live.new_text()):
                    await send_events(_events(stream, *new_text))
                await asyncio.wait({closed, call}, timeout=_MIN_EVENT_S, return_when=asyncio.FIRST_COMPLETED)
        answer = await _answer_unless(closed, call)
        rest = live.parser.remaining(answer.turn) if live.parser else ("", "")
        await send_events(_events(stream, *rest) + stream.end(answer))
    except RequestRefused as refused:
        if not started:
            raise
        session.count_refused()
        await send_events(stream.fail(refused))
    finally:
        await _stop_call(call)
    await _send(send, {"type": "http.response.body", "body": b""})


def _events(stream: AnswerStream, reasoning: str, content: str) -> bytes:
    events = stream.reasoning(reasoning) if reasoning else b""
    return events + (stream.content(content) if content else b"")


async def _stop_call(call: asyncio.Task[EndpointAnswer]) -> None:
    if not call.done():
        call.cancel()
        await asyncio.wait({call})
    if not call.cancelled():
        call.exception()  # mark the exception as retrieved, or asyncio would log it


def _start(status: int, kind: bytes, length: int | None = None) -> Message:
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _respond(send: Send, status: int, body: Mapping[str, Any]) -> None:
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    await _send(send, _start(status, b"application/json", len(data)))
    await _send(send, {"type": "http.response.body", "body": data})


async def _send(send: Send, message: Message) -> None:
    """Send a message.

    Raises:
        _Gone: the client does not read.
    """
    try:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await send(message)
    except (TimeoutError, OSError):
        raise _Gone from None
