"""Searching in what was said, over the results that are kept."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query

from prorl_envs.rollout.access import TheCaller
from prorl_envs.rollout.service import RolloutService
from prorl_envs.rollout.store import Selection
from prorl_envs.rollout.watch_views import SearchPage
from prorl_envs.viewer.episodes import MAX_QUERY

#: Results that one answer has looked at, at most.
MOST_LOOKED_AT = 1000


def add_search(app: FastAPI, service: RolloutService) -> None:
    """Add the route."""
    one_at_a_time = asyncio.Lock()  # so that whoever reads results waits for one step of a search at most

    @app.get("/v1/search")
    async def search(
        caller: TheCaller,
        text: Annotated[str, Query(min_length=1, max_length=MAX_QUERY)],
        after: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_LOOKED_AT)] = MOST_LOOKED_AT,
    ) -> SearchPage:
        """Jobs whose result has a text in a string, exactly as it is written; the tokens are not looked at.
        One answer is a step of the search, of `limit` results at most: ask again after `next`, until that
        stays the same."""
        async with one_at_a_time:
            hits = await service.store.search(text, after, limit, only=Selection(prefix=caller.prefix))
        return SearchPage(jobs=hits.jobs, next=hits.next)
