"""The dashboard: its pages, what they show, and what they change beside the other routes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Query, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from prorl_envs.policy.token_texts import token_texts
from prorl_envs.rollout.access import TheCaller
from prorl_envs.rollout.errors import NotFound
from prorl_envs.rollout.routes_results import json_response
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.store import Selection
from prorl_envs.rollout.types import JobState, Result
from prorl_envs.rollout.views import GroupView, StatusView
from prorl_envs.rollout.watch_views import DashboardView, JobPage, LimitsRequest, SummaryPage, TokenTexts
from prorl_envs.viewer.assets import HEADERS, Asset, assets, page

#: Summaries that one event brings at most; whoever falls behind reads `/v1/summaries`.
MOST_NEWS = 500
_EVENTS = "text/event-stream"

type _Unfinished = Literal["queued", "init", "run", "eval"]


def add_dashboard(app: FastAPI, service: RolloutService) -> None:
    """Add the routes. Before those of jobs, whose ids may hold slashes."""
    _add_pages(app)
    _add_watching(app, service)
    _add_jobs(app, service)


def _add_pages(app: FastAPI) -> None:
    """Scripts and styles, which say nothing of the service: they are open, what they ask for is not."""

    @app.get("/dashboard", include_in_schema=False)
    async def to_dashboard() -> Response:
        return RedirectResponse("dashboard/")

    @app.get("/dashboard/", include_in_schema=False)
    async def get_page() -> Response:
        return _file(page("live"))

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def get_asset(name: str) -> Response:
        if name not in assets():
            raise NotFound("no such file")
        return _file(assets()[name])


def _file(asset: Asset) -> Response:
    return Response(asset.content, media_type=asset.media_type, headers=HEADERS)


def _add_watching(app: FastAPI, service: RolloutService) -> None:
    watch = service.watch

    @app.get("/v1/dashboard")
    async def get_dashboard() -> DashboardView:
        """The service now, and its last ten minutes."""
        return watch.view()

    @app.get(
        "/v1/dashboard/stream",
        response_class=StreamingResponse,
        responses={200: {"content": {_EVENTS: {}}, "description": "Events `now` and `results`."}},
    )
    async def stream_dashboard(
        every_s: Annotated[float, Query(ge=0.2, le=60, allow_inf_nan=False)] = 1.0,
    ) -> StreamingResponse:
        """The same every so often as server-sent events, until the service stops: `now` is the service,
        `results` the summaries that are new, the newest 500 at most."""
        watch.check_room()
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_events(service, every_s), media_type=_EVENTS, headers=headers)

    @app.get("/v1/summaries", response_model=SummaryPage)
    async def get_summaries(
        caller: TheCaller,
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    ) -> Response:
        """Results in short, for lists: those since the start of the service and the last ones before it.
        `next` is the cursor to go on with."""
        found = await watch.page(after, limit, Selection(prefix=caller.prefix))
        body = msgspec.json.encode({"summaries": found.summaries, "next": found.next})
        return Response(body, media_type="application/json")

    @app.patch("/v1/limits")
    async def set_limits(body: LimitsRequest) -> StatusView:
        """Let more or less happen at once on the service's own machine, until it ends. What is there over a
        bound goes on to its end."""
        service.steering.resize(body)
        return service.status()


async def _events(service: RolloutService, every_s: float) -> AsyncIterator[bytes]:
    watch, cursor, goes_on = service.watch, service.watch.newest, True
    with watch.followed():
        while goes_on:
            yield b"event: now\ndata: " + watch.view().model_dump_json().encode() + b"\n\n"
            if fresh := watch.since(cursor, MOST_NEWS):
                cursor = fresh[-1].cursor
                yield b"event: results\ndata: " + msgspec.json.encode(fresh) + b"\n\n"
            goes_on = await watch.wait(every_s)


def _add_jobs(app: FastAPI, service: RolloutService) -> None:
    steering = service.steering

    @app.get("/v1/jobs")
    async def get_jobs(
        caller: TheCaller,
        state: Annotated[list[_Unfinished], Query(max_length=4)] = [],  # noqa: B006
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JobPage:
        """Unfinished jobs, those whose stage runs first."""
        states = frozenset(JobState(name) for name in state)
        return steering.jobs(prefix=caller.prefix, states=states, limit=limit)

    @app.get("/v1/jobs/{job_id:path}/partial", response_model=Result)
    async def get_partial(job_id: str) -> Response:
        """How far a job is that has no result yet, in a result's form."""
        return json_response(steering.partial(job_id))

    @app.get("/v1/jobs/{job_id:path}/tokens")
    async def get_tokens(job_id: str) -> TokenTexts:
        """The text of each token of a job's trajectory, for people; never to be tokenised again."""
        view = await service.job(job_id)
        result = await service.store.result(job_id) if view.state.final else steering.partial(job_id)
        return TokenTexts(rows=await asyncio.to_thread(_texts, service, result))

    @app.post("/v1/jobs/{job_id:path}/retry")
    async def retry_job(job_id: str, caller: TheCaller) -> GroupView:
        """Do a finished job again, as a group of its own with `:retry-<sample>` behind its id; the result
        that there is stays."""
        return await steering.retry(job_id, quota=caller.quota)


def _texts(service: RolloutService, result: Result) -> list[list[str]]:
    return [token_texts(service.renderer.decode, row.ids) for row in result.rows]
