"""The rollout service over HTTP. Routes only translate; what they mean is the service's.

Ids of groups and jobs may contain `/` and stand in the path as they are (or escaped).
"""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from pydantic import Discriminator, Field, Tag
from starlette.exceptions import HTTPException

from prorl_envs import __version__
from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.errors import (
    WIRE_ERRORS,
    CursorExpired,
    NotFound,
    ServerFault,
    TooLarge,
    Unavailable,
    WrongMethod,
)
from prorl_envs.rollout.guards import BodyLimit, TokenGuard, error_response
from prorl_envs.rollout.routes_batches import add_batches
from prorl_envs.rollout.service import RolloutService, ServiceState
from prorl_envs.rollout.types import GroupRequest, Result
from prorl_envs.rollout.views import (
    EnvironmentList,
    ErrorBody,
    GroupList,
    GroupView,
    Health,
    JobView,
    ModelServerList,
    ModelServerRequest,
    ResultPage,
    StatusView,
)

#: Seconds after which a stream with nothing to say sends an empty line, so that a dead reader is noticed.
HEARTBEAT_S = 15.0
#: Results a stream reads from the store at once.
STREAM_PAGE = 64
MAX_GROUPS = 1000

type _Groups = Annotated[list[GroupRequest], Field(min_length=1, max_length=MAX_GROUPS)]
_Submission = Annotated[
    Annotated[GroupRequest, Tag("one")] | Annotated[_Groups, Tag("list")],
    Discriminator(lambda body: "list" if isinstance(body, list) else "one"),
    Body(description="One group, or a list of groups that are accepted together or not at all."),
]
_After = Annotated[
    int, Query(ge=0, le=2**63 - 1, description="Cursor; 0 begins with the oldest result kept.")
]


def create_app(service: RolloutService, settings: ServerSettings) -> FastAPI:
    """The ASGI application of a service.

    Args:
        service: started and stopped by the caller.
        settings: token, sizes and waits.

    Raises:
        InputError: a host other than loopback without a token.
    """
    if settings.token is None and not settings.loopback:
        raise InputError(
            f"binding {settings.host} lets others in, so a token is needed",
            hint="set server.token (PRORL_SERVER__TOKEN), 16 characters or more",
        )
    app = FastAPI(
        title="prorl-envs rollout service",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses={wire.status: {"model": ErrorBody, "description": wire.name} for wire in WIRE_ERRORS},
        # Only declares the token; `TokenGuard` checks it, before the body is read.
        dependencies=[Depends(HTTPBearer(auto_error=False))],
    )
    _add_errors(app)
    _add_groups(app, service)
    _add_results(app, service, settings)
    add_batches(app, service, settings)
    _add_operation(app, service)
    token = settings.token.get_secret_value() if settings.token else None
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(TokenGuard, token=token)
    return app


def _add_groups(app: FastAPI, service: RolloutService) -> None:
    @app.post("/v1/groups")
    async def submit_groups(body: _Submission) -> GroupList:
        """Submit groups. Idempotent by id: the same request again is the same submission."""
        groups = body if isinstance(body, list) else [body]
        return GroupList(groups=await service.submit(groups))

    @app.get("/v1/groups/{group_id:path}")
    async def get_group(group_id: str) -> GroupView:
        """Where a group is; its statistics once it is complete."""
        return await service.group(group_id)

    @app.delete("/v1/groups/{group_id:path}")
    async def cancel_group(group_id: str) -> GroupView:
        """Cancel what is left of a group. Finished jobs keep their results."""
        return await service.cancel_group(group_id)

    @app.get("/v1/jobs/{job_id:path}/result", response_model=Result)
    async def get_job_result(job_id: str) -> Response:
        """The result of one finished job."""
        return _json(await service.store.result(job_id))

    @app.get("/v1/jobs/{job_id:path}")
    async def get_job(job_id: str) -> JobView:
        """Where a job is."""
        return await service.job(job_id)

    @app.delete("/v1/jobs/{job_id:path}")
    async def cancel_job(job_id: str) -> JobView:
        """Cancel a job wherever it is. Its result is recorded when this answers."""
        return await service.cancel_job(job_id)


def _add_results(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    max_page, max_wait_s = settings.max_page, settings.max_wait_s

    @app.get("/v1/results", response_model=ResultPage)
    async def get_results(
        after: _After = 0,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=max_page)] = min(100, max_page),
    ) -> Response:
        """Results after a cursor, waiting up to `wait_s` seconds for the first."""
        return _json(await service.results(after, limit=limit, wait_s=wait_s))

    @app.get(
        "/v1/results/stream",
        response_class=StreamingResponse,
        responses={200: {"content": {"application/x-ndjson": {}}, "description": "One result a line."}},
    )
    async def stream_results(after: _After = 0) -> StreamingResponse:
        """Results after a cursor as they come, one JSON object a line, until the service stops. Empty lines
        are heartbeats. To resume, ask for what comes after the last cursor read."""
        await service.results(after, limit=1)  # an expired cursor is an error, not an empty stream
        return StreamingResponse(_lines(service, after), media_type="application/x-ndjson")


async def _lines(service: RolloutService, after: int) -> AsyncIterator[str]:
    while True:
        stopped = service.state is ServiceState.STOPPED
        try:
            page = await service.results(after, limit=STREAM_PAGE, wait_s=HEARTBEAT_S)
        except CursorExpired:  # the reader is too slow; on its next request it is told so
            return
        for result in page.results:
            yield result.model_dump_json() + "\n"
        if not page.results:
            if stopped:
                return
            yield "\n"
        after = page.next


def _add_operation(app: FastAPI, service: RolloutService) -> None:
    @app.get("/v1/status")
    async def get_status() -> StatusView:
        """Pools, queues, counts, model servers."""
        return service.status()

    @app.get("/v1/environments")
    async def get_environments() -> EnvironmentList:
        """The environments on offer, with the JSON schema of their task rows."""
        return EnvironmentList(environments=service.families())

    @app.get("/v1/model_servers")
    async def get_model_servers() -> ModelServerList:
        """The model servers in use."""
        return ModelServerList(servers=service.model_servers())

    @app.post("/v1/model_servers")
    async def add_model_server(body: ModelServerRequest) -> ModelServerList:
        """Offer a further model server to new rollouts."""
        return ModelServerList(servers=await service.add_model_server(body.url))

    @app.delete("/v1/model_servers")
    async def remove_model_server(url: Annotated[str, Query(max_length=2000)]) -> ModelServerList:
        """Take a model server away."""
        return ModelServerList(servers=await service.remove_model_server(url))

    @app.get("/health")
    async def get_health() -> Health:
        """The process answers."""
        return Health(status="ok")

    @app.get("/ready")
    async def get_ready() -> Health:
        """The service takes submissions."""
        if service.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {service.state}")
        return Health(status="ok")


def _json(body: ResultPage | Result) -> Response:
    """Results are large and already validated: serialised once, without a second pass."""
    return Response(body.model_dump_json(), media_type="application/json")


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
        return error_response(kind(str(error.detail).lower(), hint="see /openapi.json"))

    @app.exception_handler(Exception)
    async def on_bug(_: Request, __: Exception) -> Response:
        # The framework raises it again after this answer, so the server's log has the traceback.
        return error_response(ServerFault("the service failed", hint="its log has the details"))


def _invalid(errors: Any) -> InputError:
    """The first problems of a request, each with its place; never what was sent."""
    problems = [
        f"{'.'.join(str(part) for part in error['loc'])[:200]}: {error['msg']}" for error in errors[:5]
    ]
    return InputError("; ".join(problems)[:2000] or "the request is malformed", hint="see /openapi.json")
