"""Route that searches the texts of stored results."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query

from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.summary import MAX_QUERY
from prorl_envs.rollout.api.types import Selection
from prorl_envs.rollout.http.auth import CurrentCaller
from prorl_envs.rollout.service.service import RolloutService

#: Maximum number of results that one request searches.
MAX_RESULTS = 1000


def add_search(app: FastAPI, service: RolloutService) -> None:
    """Add the route that searches the texts of results."""
    search_lock = asyncio.Lock()  # so that readers of results wait for at most one search step

    @app.get("/v1/search")
    async def search(
        caller: CurrentCaller,
        text: Annotated[str, Query(min_length=1, max_length=MAX_QUERY)],
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = MAX_RESULTS,
    ) -> SearchPage:
        """Return the jobs whose result contains exactly this text in one of its strings, not in its tokens.
        A request searches at most `limit` results. Repeat it with `after=next` until `next` is unchanged."""
        async with search_lock:
            return await service.store.search(text, after, limit, only=Selection(prefix=caller.prefix))
