"""Routes of batches."""

from typing import Annotated

from fastapi import FastAPI, Query, Response

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.batches import BatchList, BatchRequest, BatchTasks, BatchView, SelectedGroups
from prorl_envs.rollout.api.errors import Forbidden, NotFound
from prorl_envs.rollout.api.views import ResultPage
from prorl_envs.rollout.http.auth import Caller, CurrentCaller
from prorl_envs.rollout.http.routes.results import json_response
from prorl_envs.rollout.service.service import RolloutService


def add_batches(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes of batches, which start with `/v1/batches`."""
    batches = service.batches
    max_page, max_wait_s = settings.max_page, settings.max_wait_s

    @app.post("/v1/batches")
    async def submit_batch(body: BatchRequest, caller: CurrentCaller) -> BatchView:
        """Request a number of informative groups from a stream of tasks. Idempotent by id."""
        return await batches.submit(_with_tenant(caller, body), quota=caller.batches)

    @app.get("/v1/batches")
    async def get_batches(caller: CurrentCaller) -> BatchList:
        """Return the caller's stored batches, oldest first."""
        return BatchList(batches=[view for view in batches.views() if caller.owns(view.id)])

    @app.post("/v1/batches/{batch_id:path}/tasks")
    async def append_tasks(batch_id: str, body: BatchTasks) -> BatchView:
        """Append tasks to a batch's stream, or close it. Idempotent by the index of the first task."""
        return await batches.extend(batch_id, body)

    @app.get("/v1/batches/{batch_id:path}/groups")
    async def get_batch_groups(batch_id: str) -> SelectedGroups:
        """Return the informative groups with their statistics. Complete once the batch is finished."""
        return batches.selected(batch_id)

    @app.get("/v1/batches/{batch_id:path}/results", response_model=ResultPage)
    async def get_batch_results(
        batch_id: str,
        after: Annotated[int, Query(ge=0, le=2**31, description="Number of results to skip.")] = 0,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=max_page)] = min(100, max_page),
    ) -> Response:
        """Return the results to train on: those of informative groups, in the order of decision. Waits up to
        `wait_s` seconds for the first result. The last page of a finished batch is empty."""
        return json_response(await batches.results(batch_id, after, limit=limit, wait_s=wait_s))

    @app.get("/v1/batches/{batch_id:path}")
    async def get_batch(
        batch_id: str,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
    ) -> BatchView:
        """Return the progress of a batch. Waits up to `wait_s` seconds until it ends or needs tasks."""
        return await batches.view(batch_id, wait_s=wait_s)

    @app.delete("/v1/batches/{batch_id:path}")
    async def cancel_batch(batch_id: str) -> BatchView:
        """Cancel the groups in flight of a batch, also those that a finished batch keeps for a later one."""
        return await batches.cancel(batch_id)


def _with_tenant(caller: Caller, request: BatchRequest) -> BatchRequest:
    """Return a batch request with its caller's tenant. All batches of a tenant share one lane in the queue.

    Raises:
        Forbidden: the caller may not set this id, tenant, weight or priority.
        NotFound: the batch in `carry_from` is another caller's. The error does not reveal whether it exists.
    """
    if not caller.tenant:
        return request
    caller.check_ids(request.id)
    if request.carry_from is not None and not caller.owns(request.carry_from):
        raise NotFound(f"no batch {request.carry_from!r}")
    if (request.tenant or caller.tenant) != caller.tenant or (request.weight, request.priority) != (1.0, 0):
        raise Forbidden("only the operator may set tenant, weight and priority", hint="leave them out")
    return request.model_copy(update={"tenant": caller.tenant})
