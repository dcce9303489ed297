"""Serves stored results to a browser on this machine. Who has not got the link gets nothing."""

import asyncio
import contextlib
import hmac
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields
from operator import attrgetter

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.errors import InputError
from prorl_envs.viewer.assets import HEADERS, Asset, assets, page
from prorl_envs.viewer.episodes import MAX_QUERY, Episodes
from prorl_envs.viewer.rows import Texts, rows_of
from prorl_envs.viewer.summary import Summary

#: Bytes that are read, or looked into, between two answers to the page; and before the first one.
STEP, FIRST = 64 << 20, 8 << 20
#: Seconds that who answers waits at most for who reads to let go of the interpreter.
_SWITCH_S = 0.0005
_NAMES = tuple(field.name for field in fields(Summary))
_VALUES = attrgetter(*_NAMES)


@contextlib.asynccontextmanager
async def reading_ahead(results: Episodes, app: ASGIApp) -> AsyncIterator[ASGIApp]:
    """Read on until the first request, which is quicker with nothing beside it; each that asks reads on too.

    Args:
        results: what is read. By the time that somebody follows the link, most of it is there.
        app: that shows it.

    Returns:
        The application to serve.
    """
    waited_for = False

    async def read() -> None:
        with contextlib.suppress(InputError):  # who asks is told
            while not waited_for and await asyncio.to_thread(results.extend, FIRST):
                pass

    async def noticed(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal waited_for
        waited_for = True
        await app(scope, receive, send)

    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    task = asyncio.create_task(read())
    try:
        yield noticed
    finally:
        waited_for = True
        await task
        sys.setswitchinterval(before)


def offline_app(results: Episodes, token: str, texts: Texts | None = None) -> Starlette:
    """The application.

    Args:
        results: what is served. The caller closes it.
        token: first part of every path; unguessable.
        texts: reads tokens; None leaves them numbers.
    """

    async def episodes(request: Request) -> Response:
        """Entries from a number on, after reading on for a while."""
        known = _number(request.query_params.get("after", "0"))
        more = results.read < results.size
        if known or not results.summaries:  # the first rows wait for nothing
            more = await asyncio.to_thread(results.extend, STEP if known else FIRST)
        generation = results.generation
        same = request.query_params.get("generation", str(generation)) == str(generation)
        body = {
            "file": results.name,
            "size": results.size,
            "read": results.read,
            "more": more,
            "generation": generation,
            "bad": results.bad,
            "bad_lines": results.bad_lines,
            "texts": texts is not None,
            "names": _NAMES,  # once, not in each of thousands
            "entries": [_VALUES(one) for one in results.summaries[known if same else 0 :]],
        }
        return _json(msgspec.json.encode(body))

    async def line(request: Request) -> bytes:
        number = _number(request.path_params["number"])
        if number >= len(results.summaries):  # a link to it, before anybody has asked for the list
            await asyncio.to_thread(results.extend)
        return await asyncio.to_thread(results.line, number)

    async def episode(request: Request) -> Response:
        return _json(await line(request))

    async def tokens(request: Request) -> Response:
        if texts is None:
            raise InputError("no tokenizer is named", hint="prorl-envs view FILE --tokenizer FOLDER")
        rows = rows_of(json.loads(await line(request)))
        read = await asyncio.to_thread(lambda: [texts(row["ids"]) for row in rows])
        return _json(msgspec.json.encode({"rows": read}))

    async def search(request: Request) -> Response:
        text = request.query_params.get("text", "")
        if not 0 < len(text) <= MAX_QUERY:
            raise InputError(f"a text of 1 to {MAX_QUERY} characters is searched for")
        first = _number(request.query_params.get("after", "0"))
        found = await asyncio.to_thread(results.search, text, first, STEP)
        return _json(msgspec.json.encode({**found._asdict(), "of": len(results.summaries)}))

    async def asset(request: Request) -> Response:
        found = assets().get(request.path_params["name"])
        return answer_asset(found) if found else _error(404, "no such file")

    async def shell(_: Request) -> Response:
        return answer_asset(page("file"))

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            if not hmac.compare_digest(request.path_params["token"].encode(), token.encode()):
                return _error(404, "not found")
            try:
                return await answer(request)
            except InputError as error:
                return _error(422, error.message, error.hint)

        return checked

    routes = {
        "/{token}/": shell,
        "/{token}/api/episodes": episodes,
        "/{token}/api/episodes/{number}": episode,
        "/{token}/api/episodes/{number}/tokens": tokens,
        "/{token}/api/search": search,
        "/{token}/{name}": asset,
    }
    app = Starlette(routes=[Route(path, guarded(answer)) for path, answer in routes.items()])
    app.router.redirect_slashes = False
    return app


def answer_asset(asset: Asset) -> Response:
    """A file of the pages over HTTP."""
    return Response(asset.content, media_type=asset.media_type, headers=HEADERS)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json", headers={**HEADERS, "Cache-Control": "no-store"})


def _error(status: int, message: str, hint: str = "") -> Response:
    body = {"error": {"type": "invalid_request", "message": message, "hint": hint}}
    return Response(msgspec.json.encode(body), status, HEADERS, media_type="application/json")


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 12):
        raise InputError("a number is expected")
    return int(text)
