"""Model endpoint over HTTP: three vendors' interfaces, one session per key.

Plain ASGI: a call costs a fraction of a millisecond here, and most checks of a framework would concern
formats that the vendors define. The key is checked before a byte of the body is read.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

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
#: Seconds between two reads of a growing answer: tokens that arrive in between are sent together.
_PACE_S = 0.02
#: Timeout in seconds for a client to read the data sent.
_READ_S = 120.0


class _Gone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class EndpointApp:
    """ASGI application of the endpoint.

    Args:
        find: returns the session of a key, or None.
        model: name of the model in lists.
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
            if session is not None and refused.why is not RefusalReason.ENDED:
                session.count_refused()
            await _answer(send, refused.status, shape.error(refused))
        except _Gone:
            pass

    def _session(self, scope: Scope) -> ModelSession:
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b""), bearer if kind.lower() == b"bearer" else b""]
        for key in keys:
            if key and (session := self.find(key.strip().decode("latin-1"))):
                return session
        raise RequestRefused(RefusalReason.KEY, "this key is none, or its rollout has ended")

    async def _serve(
        self, session: ModelSession, method: str, path: str, shape: Shape, receive: Receive, send: Send
    ) -> None:
        if method in ("GET", "HEAD"):
            await _answer(send, 200, self._about(path))
            return
        if method != "POST" or path not in _SHAPES:
            raise RequestRefused(RefusalReason.ROUTE, f"there is no {method} {path[:100]}")
        if session.reason is not None:
            raise RequestRefused(RefusalReason.ENDED, f"this rollout has ended: {session.reason}")
        data = await _body(receive, session.bounds)
        asked = await session.reader.read(shape, data)
        if path.endswith("/count_tokens"):
            await _answer(send, 200, {"input_tokens": session.count_tokens(asked)})
            return
        leaving = asyncio.create_task(_left(receive))
        try:
            if asked.stream:
                await _tell(session, asked, shape.telling(asked, next(_numbers)), leaving, send)
            else:
                answered = await _unless(leaving, asyncio.create_task(session.call(asked)))
                await _answer(send, 200, shape.write(answered, asked))
        finally:
            leaving.cancel()

    def _about(self, path: str) -> dict[str, Any]:
        """Return the response to a GET request: health, or the only model.

        Raises:
            RequestRefused: there is no such path.
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
            ends = {"has_more": False, "first_id": self.model, "last_id": self.model}
            return {"object": "list", "data": [model], **ends}
        if path.startswith("/models/"):
            return {**model, "id": path.removeprefix("/models/")[:200]}
        raise RequestRefused(RefusalReason.ROUTE, f"there is no GET {path[:100]}")


_numbers = itertools.count()


def _path(path: str) -> str:
    """Return the path without `/v1`, which some clients send and some do not."""
    return path.removeprefix("/v1").rstrip("/")


async def _body(receive: Receive, bounds: EndpointLimits) -> bytes:
    """Return the body of a request.

    Raises:
        RequestRefused: it is too large, or does not arrive in time.
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
        raise RequestRefused(RefusalReason.INVALID, "the body did not come in time") from None


async def _left(receive: Receive) -> None:
    """Return once the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless(leaving: asyncio.Task[None], call: asyncio.Task[EndpointAnswer]) -> EndpointAnswer:
    """Return the answer; if the client leaves before, cancel the generation.

    Raises:
        RequestRefused: as the call.
    """
    try:
        await asyncio.wait({leaving, call}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise _Gone
        if call.cancelled():
            raise RequestRefused(RefusalReason.ENDED, "this rollout has ended")
        return call.result()
    finally:
        await _end(call)


async def _tell(
    session: ModelSession,
    asked: EndpointRequest,
    telling: AnswerStream,
    leaving: asyncio.Task[None],
    send: Send,
) -> None:
    """Stream the answer. A refusal before the first sampled token is sent as an ordinary error response."""
    live = LiveAnswer()
    call = asyncio.create_task(session.call(asked, live))
    started = False

    async def say(data: bytes) -> None:
        nonlocal started
        if not started:
            started = True
            data = telling.begin() + data
            await _send(send, _start(200, b"text/event-stream"))
        if data:
            await _send(send, {"type": "http.response.body", "body": data, "more_body": True})

    try:
        while not call.done():
            changed = asyncio.create_task(live.changed.wait())
            try:
                await asyncio.wait({leaving, call, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            if leaving.done():
                raise _Gone
            if not call.done():
                live.changed.clear()
                if any(more := live.more()):
                    await say(_pieces(telling, *more))
                await asyncio.wait({leaving, call}, timeout=_PACE_S, return_when=asyncio.FIRST_COMPLETED)
        answered = await _unless(leaving, call)
        rest = live.unfolding.rest(answered.turn) if live.unfolding else ("", "")
        await say(_pieces(telling, *rest) + telling.end(answered))
    except RequestRefused as refused:
        if not started:
            raise
        session.count_refused()
        await say(telling.fail(refused))
    finally:
        await _end(call)
    await _send(send, {"type": "http.response.body", "body": b""})


def _pieces(telling: AnswerStream, reasoning: str, content: str) -> bytes:
    said = telling.reasoning(reasoning) if reasoning else b""
    return said + (telling.content(content) if content else b"")


async def _end(call: asyncio.Task[EndpointAnswer]) -> None:
    if not call.done():
        call.cancel()
        await asyncio.wait({call})
    if not call.cancelled():
        call.exception()  # retrieve the exception, since the caller may have left


def _start(status: int, kind: bytes, length: int | None = None) -> Message:
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _answer(send: Send, status: int, body: Mapping[str, Any]) -> None:
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    await _send(send, _start(status, b"application/json", len(data)))
    await _send(send, {"type": "http.response.body", "body": data})


async def _send(send: Send, message: Message) -> None:
    """Send a message.

    Raises:
        _Gone: the client does not read.
    """
    try:
        async with asyncio.timeout(_READ_S):
            await send(message)
    except (TimeoutError, OSError):
        raise _Gone from None
