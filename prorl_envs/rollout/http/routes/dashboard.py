"""Routes of the dashboard: its pages, their data, and operations that only the dashboard needs."""

import asyncio
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse

from prorl_envs.model.tokens.token_texts import token_texts
from prorl_envs.rollout.api.dashboard import (
    DashboardView,
    JobPage,
    LimitsRequest,
    MarkdownTrees,
    SearchPage,
    SummaryPage,
    TokenTexts,
)
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.summary import MAX_QUERY
from prorl_envs.rollout.api.types import (
    BranchRequest,
    GroupRequest,
    JobState,
    Result,
    Selection,
    split_job_id,
)
from prorl_envs.rollout.api.views import GroupList, GroupView, LoginView, StatusView
from prorl_envs.rollout.http.auth import CurrentCaller, Logins, cookie_name
from prorl_envs.rollout.http.routes.results import json_response
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.viewer.assets import HEADERS, Asset, assets, page
from prorl_envs.viewer.markdown import markdown_of

#: Number of newest results that `/v1/summaries` lists, and maximum number of summaries in one response.
MAX_SUMMARIES, PAGE = 20_000, 500
#: Maximum number of results that one request searches.
MAX_SEARCHED = 1000

type _Unfinished = Literal["queued", "init", "run", "eval"]


def add_dashboard(app: FastAPI, service: RolloutService, logins: Logins) -> None:
    """Add the routes. They must be added before the routes of jobs, whose ids match any path."""
    _add_logins(app, logins)
    _add_pages(app)
    _add_state(app, service)
    _add_jobs(app, service)
    _add_search(app, service)


def _add_logins(app: FastAPI, logins: Logins) -> None:
    @app.post("/v1/logins")
    async def make_login() -> LoginView:
        """Create a link that signs one browser in to the dashboard, once."""
        return LoginView(path=logins.link())

    @app.get("/dashboard/login", include_in_schema=False)
    async def sign_in(request: Request, code: Annotated[str, Query(max_length=200)] = "") -> Response:
        """Start a browser session. If the link was used before, the page asks the user for the token."""
        response = RedirectResponse("./", HTTPStatus.SEE_OTHER, {**HEADERS, "Cache-Control": "no-store"})
        session, server = logins.redeem(code), request.scope.get("server")
        if session is not None and server:
            name = cookie_name(server[1])
            response.set_cookie(name, session, path="/", httponly=True, samesite="strict")
        return response


def _add_pages(app: FastAPI) -> None:
    """Add the routes of pages, scripts and styles. They need no token: they reveal nothing of the service."""

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


def _add_state(app: FastAPI, service: RolloutService) -> None:
    @app.get("/v1/dashboard", response_model=DashboardView)
    async def get_dashboard() -> Response:
        """Return the current state of the service, and its finished jobs of the last ten minutes."""
        return json_response(service.dashboard.view())

    @app.get("/v1/summaries", response_model=SummaryPage)
    async def get_summaries(
        caller: CurrentCaller,
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=5000)] = 1000,
    ) -> Response:
        """Return summaries of the last 20,000 stored results, at most 500 at once. `next` is the cursor for
        the next request."""
        after = max(after, await service.store.newest() - MAX_SUMMARIES)
        only = Selection(prefix=caller.prefix)
        found = await service.store.summaries(after, min(limit, PAGE), only=only)
        body = msgspec.json.encode({"summaries": found, "next": found[-1].cursor if found else after})
        return Response(body, media_type="application/json")

    @app.patch("/v1/limits")
    async def set_limits(body: LimitsRequest) -> StatusView:
        """Change the concurrency limits of the service's own machine until the service stops. Jobs above a
        lowered limit run to completion."""
        service.resize(body)
        return service.status()


def _add_jobs(app: FastAPI, service: RolloutService) -> None:
    live = service.live_jobs

    @app.get("/v1/jobs")
    async def get_jobs(
        caller: CurrentCaller,
        state: Annotated[list[_Unfinished], Query(max_length=4)] = [],  # noqa: B006
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JobPage:
        """Return unfinished jobs. Jobs with a running stage come first."""
        states = frozenset(JobState(name) for name in state)
        return live.page(prefix=caller.prefix, states=states, limit=limit)

    @app.get("/v1/jobs/{job_id:path}/partial", response_model=Result)
    async def get_partial(job_id: str) -> Response:
        """Return the partial result of an unfinished job."""
        return json_response(live.partial(job_id))

    async def result_so_far(job_id: str) -> Result:
        view = await service.groups.job(job_id)
        return await service.store.result(job_id) if view.state.final else live.partial(job_id)

    @app.get("/v1/jobs/{job_id:path}/tokens")
    async def get_tokens(job_id: str) -> TokenTexts:
        """Return the text of each token of a job's trajectory, for display. It must not be tokenised."""
        result = await result_so_far(job_id)
        return TokenTexts(rows=await asyncio.to_thread(_texts, service, result))

    @app.get("/v1/jobs/{job_id:path}/markdown", response_model=MarkdownTrees)
    async def get_markdown(job_id: str) -> Response:
        """Return the parsed Markdown of a job's messages: for each message, a tree of each part, or null."""
        result = await result_so_far(job_id)
        trees = await asyncio.to_thread(markdown_of, {"messages": result.messages})
        return Response(msgspec.json.encode({"messages": trees}), media_type="application/json")

    @app.get("/v1/jobs/{job_id:path}/request")
    async def get_request(job_id: str) -> GroupRequest:
        """Return the request of a job's group: its task row, sampling and limits."""
        await service.groups.job(job_id)
        return (await service.store.group(split_job_id(job_id)[0])).request

    @app.post("/v1/jobs/{job_id:path}/retry")
    async def retry_job(job_id: str, caller: CurrentCaller) -> GroupView:
        """Run a finished job again, as a new group whose id is the group's id with `:retry-<sample>`
        appended. The existing result stays."""
        return await service.groups.retry(job_id, quota=caller.quota)

    @app.post("/v1/jobs/{job_id:path}/branch")
    async def branch_job(job_id: str, body: BranchRequest, caller: CurrentCaller) -> GroupList:
        """Start groups with the first turns of a job, one for each number of turns. The id of a group is that
        of the job's group with `:branch-<sample>-<turns>` appended."""
        return GroupList(groups=await service.groups.branch(job_id, body, quota=caller.quota))

    @app.post("/v1/jobs/{job_id:path}/rewind")
    async def rewind_job(
        job_id: str, caller: CurrentCaller, turns: Annotated[int, Query(ge=1, le=1000)]
    ) -> GroupView:
        """Cancel a job, if it still runs, and go on after its first `turns` turns, as a new group
        whose id is that of the job's group with `:rewind-<sample>-<turns>` appended."""
        return await service.groups.rewind(job_id, turns, quota=caller.quota)


def _texts(service: RolloutService, result: Result) -> list[list[str]]:
    return [token_texts(service.renderer.decode, row.ids) for row in result.rows]


def _add_search(app: FastAPI, service: RolloutService) -> None:
    search_lock = asyncio.Lock()  # so that readers of results wait for at most one search step

    @app.get("/v1/search")
    async def search(
        caller: CurrentCaller,
        text: Annotated[str, Query(min_length=1, max_length=MAX_QUERY)],
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_SEARCHED)] = MAX_SEARCHED,
    ) -> SearchPage:
        """Return the jobs whose result contains exactly this text in one of its strings, not in its tokens.
        A request searches at most `limit` results. Repeat it with `after=next` until `next` is unchanged."""
        async with search_lock:
            return await service.store.search(text, after, limit, only=Selection(prefix=caller.prefix))
