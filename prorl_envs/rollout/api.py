"""The rollout service over HTTP. Routes only translate; what they mean is the service's.

Ids of groups and jobs may contain `/` and stand in the path as they are (or escaped).
"""

from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from pydantic import Discriminator, Field, Tag
from starlette.exceptions import HTTPException

from prorl_envs import __version__
from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.access import Keyring, TheCaller, authorize
from prorl_envs.rollout.errors import (
    WIRE_ERRORS,
    NotFound,
    ServerFault,
    TooLarge,
    WrongMethod,
)
from prorl_envs.rollout.guards import BodyLimit, TokenGuard, error_response
from prorl_envs.rollout.leases import Following
from prorl_envs.rollout.metrics import CONTENT_TYPE
from prorl_envs.rollout.paper_routes import add_paper_routes
from prorl_envs.rollout.routes_batches import add_batches
from prorl_envs.rollout.routes_dashboard import add_dashboard
from prorl_envs.rollout.routes_endpoint import add_endpoint
from prorl_envs.rollout.routes_episodes import add_episodes
from prorl_envs.rollout.routes_models import add_models
from prorl_envs.rollout.routes_nodes import add_nodes
from prorl_envs.rollout.routes_operation import add_operation
from prorl_envs.rollout.routes_results import add_results, json_response
from prorl_envs.rollout.routes_search import add_search
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.types import GroupRequest, Result
from prorl_envs.rollout.views import (
    EnvironmentList,
    ErrorBody,
    GroupList,
    GroupView,
    Health,
    JobToken,
    JobView,
    StatusView,
)

MAX_GROUPS = 1000

type _Groups = Annotated[list[GroupRequest], Field(min_length=1, max_length=MAX_GROUPS)]
_Submission = Annotated[
    Annotated[GroupRequest, Tag("one")] | Annotated[_Groups, Tag("list")],
    Discriminator(lambda body: "list" if isinstance(body, list) else "one"),
    Body(description="One group, or a list of groups that are accepted together or not at all."),
]


def create_app(service: RolloutService, settings: ServerSettings) -> FastAPI:
    """The ASGI application of a service.

    Args:
        service: started and stopped by the caller.
        settings: token, sizes and waits.

    Raises:
        InputError: a host other than loopback without a token.
    """
    keyring = Keyring(settings)
    if not keyring.locked and not settings.loopback:
        raise InputError(
            f"binding {settings.host} lets others in, so a token is needed",
            hint="set server.token (PRORL_SERVER__TOKEN), 16 characters or more",
        )

    async def started(request: Request) -> None:
        """Else what the store knows and the service does not yet would seem not to exist."""
        path = request.url.path
        if path.startswith("/v1/") and path != "/v1/status":
            service.check_started()

    service.room.quotas = {f"{name}/": tenant.jobs for name, tenant in settings.tenants.items()}
    app = FastAPI(
        title="prorl-envs rollout service",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=_error_answers(),
        # Only declares the token; `TokenGuard` checks it, before the body is read.
        dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(authorize), Depends(started)],
    )
    _add_errors(app)
    add_dashboard(app, service)
    add_search(app, service)
    _add_groups(app, service, settings, keyring)
    add_results(app, service, settings)
    add_batches(app, service, settings)
    add_episodes(app, service, settings)
    _add_status(app, service)
    if settings.paper_routes:
        add_paper_routes(app, service)
    add_operation(app, service, settings)
    add_models(app, service, settings)
    add_nodes(app, service)
    app.add_middleware(Following, leases=service.leases)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(TokenGuard, keyring=keyring)
    add_endpoint(app, service)  # last, so that it stands in front of the guards
    return app


def _error_answers() -> dict[int | str, dict[str, Any]]:
    """What may be answered instead, by status: the names of its errors."""
    names: dict[int, list[str]] = {}
    for wire in WIRE_ERRORS:
        names.setdefault(wire.status, []).append(wire.name)
    return {status: {"model": ErrorBody, "description": ", ".join(found)} for status, found in names.items()}


def _add_groups(app: FastAPI, service: RolloutService, settings: ServerSettings, keyring: Keyring) -> None:
    type Wait = Annotated[float, Query(ge=0, le=settings.max_wait_s, allow_inf_nan=False)]

    @app.post("/v1/groups")
    async def submit_groups(body: _Submission, caller: TheCaller) -> GroupList:
        """Submit groups. Idempotent by id: the same request again is the same submission."""
        groups = body if isinstance(body, list) else [body]
        caller.check_ids(*(group.id for group in groups))
        return GroupList(groups=await service.submit(groups, quota=caller.quota))

    @app.get("/v1/groups/{group_id:path}")
    async def get_group(group_id: str, wait_s: Wait = 0.0) -> GroupView:
        """Where a group is, its statistics once it is complete; waits up to `wait_s` seconds until it is."""
        return await service.group(group_id, wait_s=wait_s)

    @app.delete("/v1/groups/{group_id:path}")
    async def cancel_group(group_id: str) -> GroupView:
        """Cancel what is left of a group. Finished jobs keep their results."""
        return await service.cancel_group(group_id)

    @app.get("/v1/jobs/{job_id:path}/result", response_model=Result)
    async def get_job_result(job_id: str) -> Response:
        """The result of one finished job."""
        return json_response(await service.store.result(job_id))

    @app.post("/v1/jobs/{job_id:path}/token")
    async def make_job_token(job_id: str) -> JobToken:
        """A token for whoever may look at this job and end it, and nothing else."""
        await service.job(job_id)
        return JobToken(token=keyring.job_token(job_id))

    @app.get("/v1/jobs/{job_id:path}")
    async def get_job(job_id: str, wait_s: Wait = 0.0) -> JobView:
        """Where a job is; waits up to `wait_s` seconds until it is finished."""
        return await service.job(job_id, wait_s=wait_s)

    @app.delete("/v1/jobs/{job_id:path}")
    async def cancel_job(job_id: str) -> JobView:
        """Cancel a job wherever it is. Its result is recorded when this answers."""
        return await service.cancel_job(job_id)


def _add_status(app: FastAPI, service: RolloutService) -> None:
    @app.get("/v1/status")
    async def get_status() -> StatusView:
        """Pools, queues, counts, model servers."""
        return service.status()

    @app.get("/v1/environments")
    async def get_environments() -> EnvironmentList:
        """The environments on offer, with the JSON schema of their task rows."""
        return EnvironmentList(environments=service.offer.views())

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE: {}}, "description": "Prometheus' text format."}},
    )
    async def get_metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/health")
    async def get_health() -> Health:
        """The process answers."""
        return Health(status="ok")

    @app.get("/ready")
    async def get_ready() -> Health:
        """The service takes submissions."""
        service.check_open()
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
