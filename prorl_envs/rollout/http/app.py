"""HTTP API of the rollout service. Routes only translate requests to calls of the service.

Ids of groups and jobs may contain `/`. In paths they may be escaped or not.
"""

from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import Discriminator, Field, Tag
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

from prorl_envs import __version__
from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.api.errors import WIRE_ERRORS, NotFound, ServerFault, TooLarge, WrongMethod
from prorl_envs.rollout.api.types import GroupRequest, Result
from prorl_envs.rollout.api.views import (
    EnvironmentList,
    ErrorBody,
    GroupList,
    GroupView,
    Health,
    JobView,
    StatusView,
)
from prorl_envs.rollout.http.auth import CurrentCaller, Logins, TokenStore, authorize, require_token
from prorl_envs.rollout.http.middleware import BodyLimit, LeaseMiddleware, TokenGuard, error_response
from prorl_envs.rollout.http.routes.batches import add_batches
from prorl_envs.rollout.http.routes.dashboard import add_dashboard
from prorl_envs.rollout.http.routes.endpoint import add_endpoint
from prorl_envs.rollout.http.routes.interactive import add_episodes
from prorl_envs.rollout.http.routes.operation import add_operation
from prorl_envs.rollout.http.routes.paper import add_paper_routes
from prorl_envs.rollout.http.routes.results import add_results, json_response
from prorl_envs.rollout.monitoring.metrics import CONTENT_TYPE
from prorl_envs.rollout.service.service import RolloutService

MAX_GROUPS = 1000
#: OpenAPI entry of a route that needs no token.
_OPEN: dict[str, Any] = {"security": []}

type _Groups = Annotated[list[GroupRequest], Field(min_length=1, max_length=MAX_GROUPS)]
_Submission = Annotated[
    Annotated[GroupRequest, Tag("one")] | Annotated[_Groups, Tag("list")],
    Discriminator(lambda body: "list" if isinstance(body, list) else "one"),
    Body(description="One group, or a list of groups that are accepted together or not at all."),
]


def create_app(service: RolloutService, settings: ServerSettings, logins: Logins | None = None) -> FastAPI:
    """Create the ASGI application of a service.

    Args:
        service: the service, which the caller starts and stops.
        settings: tokens, maximum sizes and waits. Without a token every local user has access, on loopback.
        logins: browser sessions; None creates an empty set.

    Raises:
        InputError: no token on a host that is not loopback, or an unknown environment in `paper_sources`.
    """
    require_token(settings)
    tokens = TokenStore(settings, logins)

    async def check_started(request: Request) -> None:
        """Check that the store has been read. Before that, stored groups would seem not to exist."""
        path = request.url.path
        if path.startswith("/v1/") and path != "/v1/status":
            service.guard.check_started()

    service.groups.limit_tenants({name: tenant.jobs for name, tenant in settings.tenants.items()})
    # This declares the token in the OpenAPI schema; `TokenGuard` checks it, before the body is read.
    declared = [Depends(HTTPBearer(auto_error=False))] if tokens.locked else []
    app = FastAPI(
        title="prorl-envs rollout service",
        version=__version__,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,
        responses=_error_responses(),
        dependencies=[*declared, Depends(authorize), Depends(check_started)],
    )
    _add_errors(app)
    add_dashboard(app, service, tokens.logins)
    _add_groups(app, service, settings)
    add_results(app, service, settings)
    add_batches(app, service, settings)
    add_episodes(app, service, settings)
    _add_status(app, service)
    if settings.paper_routes:
        add_paper_routes(app, service, settings.paper_sources)
    add_operation(app, service, settings)
    app.add_middleware(LeaseMiddleware, leases=service.groups.leases)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(TokenGuard, tokens=tokens)
    add_endpoint(app, service)  # added last, so that its middleware runs before the token guard
    return app


def _error_responses() -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI error responses of all routes, by status, with the names of the errors."""
    names: dict[int, list[str]] = {}
    for wire in WIRE_ERRORS:
        names.setdefault(wire.status, []).append(wire.name)
    return {status: {"model": ErrorBody, "description": ", ".join(found)} for status, found in names.items()}


def _add_groups(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    type Wait = Annotated[float, Query(ge=0, le=settings.max_wait_s, allow_inf_nan=False)]

    @app.post("/v1/groups")
    async def submit_groups(body: _Submission, caller: CurrentCaller) -> GroupList:
        """Submit groups. Idempotent by id: a repeated request has no further effect."""
        groups = body if isinstance(body, list) else [body]
        caller.check_ids(*(group.id for group in groups))
        caller.check_ids(*(group.start.job_id for group in groups if group.start is not None))
        return GroupList(groups=await service.groups.submit(groups, quota=caller.quota))

    @app.get("/v1/groups/{group_id:path}")
    async def get_group(group_id: str, wait_s: Wait = 0.0) -> GroupView:
        """Return the state of a group, with its statistics once it is complete. Waits up to `wait_s` seconds
        for completion."""
        return await service.groups.group(group_id, wait_s=wait_s)

    @app.delete("/v1/groups/{group_id:path}")
    async def cancel_group(group_id: str) -> GroupView:
        """Cancel the unfinished jobs of a group. Finished jobs keep their results."""
        return await service.groups.cancel(group_id)

    @app.get("/v1/jobs/{job_id:path}/result", response_model=Result)
    async def get_job_result(
        job_id: str,
        acknowledge: Annotated[bool, Query(description="Mark the result as read once it is sent.")] = True,
    ) -> Response:
        """Return the result of a finished job."""
        result = await service.store.result(job_id)
        return json_response(result, BackgroundTask(service.feed.mark_read, result) if acknowledge else None)

    @app.get("/v1/jobs/{job_id:path}")
    async def get_job(job_id: str, wait_s: Wait = 0.0) -> JobView:
        """Return the state of a job. Waits up to `wait_s` seconds until it is finished."""
        return await service.groups.job(job_id, wait_s=wait_s)

    @app.delete("/v1/jobs/{job_id:path}")
    async def cancel_job(job_id: str) -> JobView:
        """Cancel a job in any state. Its result is recorded when this route answers."""
        return await service.groups.cancel_job(job_id)


def _add_status(app: FastAPI, service: RolloutService) -> None:
    @app.get("/v1/status")
    async def get_status() -> StatusView:
        """Return pools, queues, counts and model servers."""
        return service.status()

    @app.get("/v1/environments")
    async def get_environments() -> EnvironmentList:
        """Return the service's environments, with the JSON schemas of their task rows."""
        return EnvironmentList(environments=service.groups.environments.views())

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE: {}}, "description": "Prometheus' text format."}},
    )
    async def get_metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/health", openapi_extra=_OPEN)
    async def get_health() -> Health:
        """Answer if the process is alive."""
        return Health(status="ok")

    @app.get("/ready", openapi_extra=_OPEN)
    async def get_ready() -> Health:
        """Answer if the service accepts submissions."""
        service.guard.check_open()
        service.store.check_writable()
        return Health(status="ok")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ProrlError)
    async def on_error(_: Request, error: ProrlError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(_invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> Response:
        by_status: dict[int, type[ProrlError]] = {404: NotFound, 405: WrongMethod, 413: TooLarge}
        kind = by_status.get(error.status_code, InputError)
        response = error_response(kind(str(error.detail).lower(), hint="see /openapi.json"))
        response.headers.update(error.headers or {})  # such as `Allow`, for a wrong method
        return response

    @app.exception_handler(Exception)
    async def on_bug(_: Request, __: Exception) -> Response:
        # Starlette raises the error again after this response, so the server's log has the traceback.
        return error_response(ServerFault("the service has a bug", hint="its log has the details"))


def _invalid(errors: Any) -> InputError:
    """Return the error for an invalid request: its first problems, with their locations in the request. It
    does not quote the request."""
    problems = [
        f"{'.'.join(str(part) for part in error['loc'])[:200]}: {error['msg']}" for error in errors[:5]
    ]
    return InputError("; ".join(problems)[:2000] or "the request is malformed", hint="see /openapi.json")
