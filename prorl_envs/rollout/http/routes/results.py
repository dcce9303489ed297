"""Routes of results: pages, and resumable streams."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Header, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, StringConstraints
from starlette.background import BackgroundTask

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.errors import CursorExpired
from prorl_envs.rollout.api.types import JobState, Selection
from prorl_envs.rollout.api.views import AcknowledgeRequest, Health, ResultPage
from prorl_envs.rollout.http.auth import CurrentCaller
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.service.state import ServiceState

#: Seconds without results after which a stream sends a heartbeat, so that a broken connection is detected.
HEARTBEAT_S = 15.0
#: Maximum number of results that a stream reads from the store at once.
STREAM_PAGE = 64
#: Maximum number of values of one filter.
MAX_VALUES = 100

_LINES, _EVENTS = "application/x-ndjson", "text/event-stream"
_NO_CACHE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not buffer streams

_Names = list[Annotated[str, StringConstraints(max_length=200)]]
_Final = Literal["done", "failed", "cancelled"]
_After = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="Cursor; 0 starts with the oldest stored result.")
]
_LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=2**63 - 1, description="Cursor to resume after, before `after`."),
]


async def _selection(
    caller: CurrentCaller,
    group: Annotated[_Names, Query(max_length=MAX_VALUES, description="Group ids.")] = [],  # noqa: B006
    environment: Annotated[_Names, Query(max_length=MAX_VALUES, description="Names.")] = [],  # noqa: B006
    state: Annotated[list[_Final], Query(max_length=3, description="Final states.")] = [],  # noqa: B006
) -> Selection:
    return Selection(
        prefix=caller.prefix,
        groups=frozenset(group),
        environments=frozenset(environment),
        states=frozenset(JobState(name) for name in state),
    )


_Only = Annotated[Selection, Depends(_selection)]
_Acknowledge = Annotated[
    bool, Query(description="Mark the results up to `after` that were sent to this reader as read.")
]


def add_results(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes that return results, as pages or as a stream, and acknowledge them."""
    max_page, max_wait_s = settings.max_page, settings.max_wait_s

    @app.get("/v1/results", response_model=ResultPage)
    async def get_results(
        only: _Only,
        after: _After = 0,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=max_page)] = min(100, max_page),
        acknowledge: _Acknowledge = True,
    ) -> Response:
        """Return results after a cursor. Waits up to `wait_s` seconds for the first result. The cursor `next`
        skips results that do not pass the filters."""
        return json_response(
            await service.feed.page(after, limit=limit, wait_s=wait_s, only=only, acknowledge=acknowledge)
        )

    @app.post("/v1/results/acknowledge")
    async def acknowledge_results(body: AcknowledgeRequest, caller: CurrentCaller) -> Health:
        """Mark results as read, so that the store may drop them."""
        only = Selection(
            prefix=caller.prefix,
            groups=frozenset(body.groups),
            environments=frozenset(body.environments),
            states=frozenset(JobState(name) for name in body.states),
        )
        await service.feed.acknowledge(body.after, body.up_to, only)
        return Health(status="ok")

    @app.get(
        "/v1/results/stream",
        response_class=StreamingResponse,
        responses={
            200: {"content": {_LINES: {}, _EVENTS: {}}, "description": "One result per line or event."}
        },
    )
    async def stream_results(
        only: _Only,
        after: _After = 0,
        last_event_id: _LastEventId = None,
        accept: Annotated[str, Header(description=f"{_EVENTS} selects server-sent events.")] = _LINES,
        acknowledge: _Acknowledge = True,
    ) -> StreamingResponse:
        """Stream results after a cursor as they arrive, until the service stops. The stream has one JSON
        object per line, with empty lines as heartbeats. Or it has server-sent events, whose ids are cursors.
        Each result is sent at least once. To resume, request the results after the last received cursor."""
        after = after if last_event_id is None else last_event_id
        if acknowledge:
            service.feed.readers.confirmed(only, after)
        # This raises CursorExpired before the response starts; afterwards the stream could only end.
        await service.feed.page(after, limit=1, only=only, acknowledge=False)
        pages = _pages(service, after, only, acknowledge=acknowledge)
        if _EVENTS in accept.lower():
            return StreamingResponse(_events(pages), media_type=_EVENTS, headers=_NO_CACHE)
        return StreamingResponse(_lines(pages), media_type=_LINES, headers=_NO_CACHE)


async def _lines(pages: AsyncIterator[ResultPage]) -> AsyncIterator[str]:
    async for page in pages:
        for result in page.results:
            yield result.model_dump_json() + "\n"
        if not page.results:
            yield "\n"


async def _events(pages: AsyncIterator[ResultPage]) -> AsyncIterator[str]:
    """Yield server-sent events (HTML standard, section 9.2). A result is JSON in one `data` line."""
    async for page in pages:
        for result in page.results:
            yield f"id: {result.cursor}\nevent: result\ndata: {result.model_dump_json()}\n\n"
        if not page.results:  # clients ignore an event without data, but update their last event id
            yield f"id: {page.next}\n\n"


async def _pages(
    service: RolloutService, after: int, only: Selection, *, acknowledge: bool
) -> AsyncIterator[ResultPage]:
    """Yield pages of results, each after the client took the previous one. Empty pages are heartbeats."""
    start = after
    while True:
        stopped = service.guard.state is ServiceState.STOPPED
        try:
            page = await service.feed.page(
                after, limit=STREAM_PAGE, wait_s=HEARTBEAT_S, only=only, acknowledge=False
            )
        except CursorExpired:  # the reader was too slow; its next request gets the error
            return
        if stopped and not page.results:
            return
        if acknowledge:  # results of a broken connection become read when the reader requests the next ones
            service.feed.readers.sent(only, start, page)
        yield page
        after = page.next


def json_response(body: BaseModel, after: BackgroundTask | None = None) -> Response:
    """Return the response for results. It is serialised without a second validation, since results are large
    and already validated.

    Args:
        body: the view that contains the results.
        after: a task that runs after the body was sent.
    """
    return Response(body.model_dump_json(), media_type="application/json", background=after)
