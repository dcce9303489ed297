"""Results over HTTP: pages, and streams that a reader resumes."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import StringConstraints

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.access import TheCaller
from prorl_envs.rollout.errors import CursorExpired
from prorl_envs.rollout.service import RolloutService, ServiceState
from prorl_envs.rollout.store import Selection
from prorl_envs.rollout.types import JobState, Result
from prorl_envs.rollout.views import ResultPage

#: Seconds after which a stream with nothing to say sends a heartbeat, so that a dead reader is noticed.
HEARTBEAT_S = 15.0
#: Results a stream reads from the store at once.
STREAM_PAGE = 64
#: Values of one filter.
MAX_VALUES = 100

_LINES, _EVENTS = "application/x-ndjson", "text/event-stream"
_NO_CACHE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy passes on what comes at once

_Names = list[Annotated[str, StringConstraints(max_length=200)]]
_Final = Literal["done", "failed", "cancelled"]
_After = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="Cursor; 0 begins with the oldest result kept.")
]
_LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=2**63 - 1, description="Resumes events; wins over `after`."),
]


async def _selection(
    caller: TheCaller,
    group: Annotated[_Names, Query(max_length=MAX_VALUES, description="Only of these groups.")] = [],  # noqa: B006
    environment: Annotated[_Names, Query(max_length=MAX_VALUES, description="Only of these.")] = [],  # noqa: B006
    state: Annotated[list[_Final], Query(max_length=3, description="Only these.")] = [],  # noqa: B006
) -> Selection:
    return Selection(
        prefix=caller.prefix,
        groups=frozenset(group),
        environments=frozenset(environment),
        states=frozenset(JobState(name) for name in state),
    )


_Only = Annotated[Selection, Depends(_selection)]


def add_results(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes."""
    max_page, max_wait_s = settings.max_page, settings.max_wait_s

    @app.get("/v1/results", response_model=ResultPage)
    async def get_results(
        only: _Only,
        after: _After = 0,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=max_page)] = min(100, max_page),
    ) -> Response:
        """Results after a cursor, waiting up to `wait_s` seconds for the first. `next` passes over what the
        filters leave out."""
        return json_response(await service.results(after, limit=limit, wait_s=wait_s, only=only))

    @app.get(
        "/v1/results/stream",
        response_class=StreamingResponse,
        responses={
            200: {"content": {_LINES: {}, _EVENTS: {}}, "description": "One result a line, or event."}
        },
    )
    async def stream_results(
        only: _Only,
        after: _After = 0,
        last_event_id: _LastEventId = None,
        accept: Annotated[str, Header(description=f"{_EVENTS} asks for server-sent events.")] = _LINES,
    ) -> StreamingResponse:
        """Results after a cursor as they come, until the service stops: one JSON object a line, where empty
        lines are heartbeats, or server-sent events, whose ids are cursors. Each result comes at least once;
        to resume, ask for what comes after the last cursor read."""
        after = after if last_event_id is None else last_event_id
        await service.results(after, limit=1, only=only)  # an expired cursor is an error, not an empty stream
        if _EVENTS in accept.lower():
            return StreamingResponse(_events(service, after, only), media_type=_EVENTS, headers=_NO_CACHE)
        return StreamingResponse(_lines(service, after, only), media_type=_LINES, headers=_NO_CACHE)


async def _lines(service: RolloutService, after: int, only: Selection) -> AsyncIterator[str]:
    async for page in _pages(service, after, only):
        for result in page.results:
            yield result.model_dump_json() + "\n"
        if not page.results:
            yield "\n"


async def _events(service: RolloutService, after: int, only: Selection) -> AsyncIterator[str]:
    """As the HTML standard has it, section 9.2. JSON has no line ends, so each result is one `data` line."""
    async for page in _pages(service, after, only):
        for result in page.results:
            yield f"id: {result.cursor}\nevent: result\ndata: {result.model_dump_json()}\n\n"
        if not page.results:  # an event without data is not shown, but moves the reader's last id
            yield f"id: {page.next}\n\n"


async def _pages(service: RolloutService, after: int, only: Selection) -> AsyncIterator[ResultPage]:
    """What comes, each page once the reader has taken the one before. Empty ones are heartbeats."""
    while True:
        stopped = service.state is ServiceState.STOPPED
        try:
            page = await service.results(after, limit=STREAM_PAGE, wait_s=HEARTBEAT_S, only=only)
        except CursorExpired:  # the reader is too slow; on its next request it is told so
            return
        if stopped and not page.results:
            return
        yield page
        after = page.next


def json_response(body: ResultPage | Result) -> Response:
    """Results are large and already validated: serialised once, without a second pass."""
    return Response(body.model_dump_json(), media_type="application/json")
