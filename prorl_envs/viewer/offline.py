"""Server of stored results for a browser on this machine. Requests without the secret token get a 404."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields
from operator import attrgetter

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import MAX_QUERY, Summary
from prorl_envs.viewer.assets import HEADERS, Asset, assets, page
from prorl_envs.viewer.episodes import EpisodeSource, Texts, rows_of
from prorl_envs.viewer.markdown import markdown_of
from prorl_envs.viewer.runs import RunsFolder, RunView

#: Bytes to read or search per request, and to read for the first request.
STEP, FIRST = 64 << 20, 8 << 20
_NAMES = tuple(field.name for field in fields(Summary))
_VALUES = attrgetter(*_NAMES)


def offline_app(
    results: EpisodeSource,
    token: str,
    texts: Texts | None = None,
    run: RunView | None = None,
    *,
    among_runs: bool = False,
) -> Starlette:
    """Create the application for one source of results.

    Args:
        results: results to serve. The caller closes them.
        token: secret first part of every path.
        texts: decoder of token ids; None shows the ids.
        run: run of the results.
        among_runs: the page links to a list of runs two levels above its path.
    """

    async def episodes(request: Request) -> Response:
        """Return the summaries from number `after` on, after reading further results."""
        known = _number(request.query_params.get("after", "0"))
        more = results.read < results.size
        if known or not results.summaries:  # a page that is opened again gets what has been read
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
            "overview": run is not None,
            "runs": among_runs,
            "names": _NAMES,  # names of the values in each entry
            "entries": [_VALUES(summary) for summary in results.summaries[known if same else 0 :]],
        }
        return _json(msgspec.json.encode(body))

    async def line(request: Request) -> bytes:
        number = _number(request.path_params["number"])
        if number >= len(results.summaries):  # the user has opened a direct link
            await asyncio.to_thread(results.extend)
        return await asyncio.to_thread(results.line, number)

    async def episode(request: Request) -> Response:
        return _json(await line(request))

    async def tokens(request: Request) -> Response:
        if texts is None:
            raise InputError("there is no tokenizer", hint="prorl-envs view FILE --tokenizer FOLDER")
        rows = rows_of(json.loads(await line(request)))
        read = await asyncio.to_thread(lambda: [texts(row["ids"]) for row in rows])
        return _json(msgspec.json.encode({"rows": read}))

    async def markdown(request: Request) -> Response:
        result = json.loads(await line(request))
        return _json(msgspec.json.encode({"messages": await asyncio.to_thread(markdown_of, result)}))

    async def overview(_: Request) -> Response:
        if run is None:
            raise InputError("there is no overview of these results")
        return _json(msgspec.json.encode(await asyncio.to_thread(run.overview, results.summaries)))

    async def group_request(request: Request) -> Response:
        number = _number(request.path_params["number"])
        await line(request)
        group = results.summaries[number].group_id
        found = await asyncio.to_thread(run.request, group) if run else None
        return _json(msgspec.json.encode({"request": found}))

    async def search(request: Request) -> Response:
        text = request.query_params.get("text", "")
        if not 0 < len(text) <= MAX_QUERY:
            raise InputError(f"the text to search for must have 1 to {MAX_QUERY} characters")
        first = _number(request.query_params.get("after", "0"))
        found = await asyncio.to_thread(results.search, text, first, STEP)
        return _json(msgspec.json.encode({**found._asdict(), "of": len(results.summaries)}))

    async def shell(_: Request) -> Response:
        return answer_asset(page("file"))

    routes = {
        "/{token}/": shell,
        "/{token}/api/episodes": episodes,
        "/{token}/api/episodes/{number}": episode,
        "/{token}/api/episodes/{number}/tokens": tokens,
        "/{token}/api/episodes/{number}/markdown": markdown,
        "/{token}/api/episodes/{number}/request": group_request,
        "/{token}/api/overview": overview,
        "/{token}/api/search": search,
        "/{token}/{name}": _asset,
    }
    return _application(routes, token)


@contextlib.asynccontextmanager
async def runs_app(runs: RunsFolder, token: str, texts: Texts | None = None) -> AsyncIterator[ASGIApp]:
    """Create the application for the runs of a folder: a list of the runs, and pages for each run below
    `run/NAME/`. The end of the context closes the results of all opened runs.

    Args:
        runs: runs of the folder.
        token: secret first part of every path.
        texts: decoder of token ids; None shows the ids.
    """
    opened: dict[str, Starlette] = {}
    opening = asyncio.Lock()
    closing = contextlib.ExitStack()

    async def shell(_: Request) -> Response:
        return answer_asset(page("runs"))

    async def list_runs(_: Request) -> Response:
        found = await asyncio.to_thread(runs.list)
        return _json(msgspec.json.encode({"folder": runs.name, "runs": found}))

    async def run_page(request: Request) -> Response:
        name = request.path_params["run"]
        async with opening:
            if name not in opened:
                results, run = await asyncio.to_thread(runs.open, name)
                closing.callback(results.close)
                opened[name] = offline_app(results, token, texts, run, among_runs=True)
        return _Forward(opened[name], f"/{token}/{request.path_params['rest']}")

    routes = {
        "/{token}/": shell,
        "/{token}/api/runs": list_runs,
        "/{token}/run/{run}/{rest:path}": run_page,
        "/{token}/{name}": _asset,
    }
    with closing:
        yield _application(routes, token)


async def _asset(request: Request) -> Response:
    found = assets().get(request.path_params["name"])
    return answer_asset(found) if found else _error(404, "no such file")


class _Forward(Response):
    """Response of another application.

    Args:
        app: the other application.
        path: path of the request to the other application.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "path": self._path, "raw_path": self._path.encode()}, receive, send)


type _Answer = Callable[[Request], Awaitable[Response]]


def _application(routes: Mapping[str, _Answer], token: str) -> Starlette:
    """Create an application with the routes, and check the token of each request."""

    def guarded(answer: _Answer) -> _Answer:
        async def checked(request: Request) -> Response:
            if not hmac.compare_digest(request.path_params["token"].encode(), token.encode()):
                return _error(404, "not found")
            try:
                return await answer(request)
            except InputError as error:
                return _error(422, error.message, error.hint)

        return checked

    app = Starlette(routes=[Route(path, guarded(answer)) for path, answer in routes.items()])
    app.router.redirect_slashes = False
    return app


def answer_asset(asset: Asset) -> Response:
    """Return a response with a file of the pages."""
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
