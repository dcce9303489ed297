"""Routes of results: pages, and their acknowledgement."""

from typing import Annotated, Literal

from fastapi import Depends, FastAPI, Query, Response
from pydantic import BaseModel, StringConstraints
from starlette.background import BackgroundTask

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.types import JobState, Selection
from prorl_envs.rollout.api.views import AcknowledgeRequest, Health, ResultPage
from prorl_envs.rollout.http.auth import CurrentCaller
from prorl_envs.rollout.service.service import RolloutService

#: Maximum number of values of one filter.
MAX_VALUES = 100

_Names = list[Annotated[str, StringConstraints(max_length=200)]]
_Final = Literal["done", "failed", "cancelled"]


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


def add_results(app: FastAPI, service: RolloutService, settings: ServerSettings) -> None:
    """Add the routes that return results and acknowledge them."""
    max_page, max_wait_s = settings.max_page, settings.max_wait_s

    @app.get("/v1/results", response_model=ResultPage)
    async def get_results(
        only: Annotated[Selection, Depends(_selection)],
        after: Annotated[
            int, Query(ge=0, le=2**63 - 1, description="Cursor; 0 starts with the oldest stored result.")
        ] = 0,
        wait_s: Annotated[float, Query(ge=0, le=max_wait_s, allow_inf_nan=False)] = 0.0,
        limit: Annotated[int, Query(ge=1, le=max_page)] = min(100, max_page),
        acknowledge: Annotated[
            bool, Query(description="Mark the results up to `after` that were sent to this reader as read.")
        ] = True,
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


def json_response(body: BaseModel, after: BackgroundTask | None = None) -> Response:
    """Return the response for results. It is serialised without a second validation, since results are large
    and already validated.

    Args:
        body: the view that contains the results.
        after: a task that runs after the body was sent.
    """
    return Response(body.model_dump_json(), media_type="application/json", background=after)
