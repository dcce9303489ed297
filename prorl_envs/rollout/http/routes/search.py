"""Route that searches the texts of stored results."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query

from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.types import Selection
from prorl_envs.rollout.http.auth import CurrentCaller
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.viewer.episodes import MAX_QUERY

#: Maximum number of results that one request searches.
MOST_LOOKED_AT = 1000


def add_search(app: FastAPI, service: RolloutService) -> None:
    """Add the route."""
    one_at_a_time = asyncio.Lock()  # result readers then wait for at most one search step

    @app.get("/v1/search")
    async def search(
        caller: CurrentCaller,
        text: Annotated[str, Query(min_length=1, max_length=MAX_QUERY)],
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_LOOKED_AT)] = MOST_LOOKED_AT,
    ) -> SearchPage:
        """Return the jobs whose result contains a text in a string, exactly as written; tokens are not
        searched. One request searches `limit` results at most: repeat it after `next`, until that stays the
        same."""
        async with one_at_a_time:
            hits = await service.store.search(text, after, limit, only=Selection(prefix=caller.prefix))
        return SearchPage(jobs=hits.jobs, next=hits.next)
