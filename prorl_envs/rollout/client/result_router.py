"""Router of results to waiting callers: one connection to the service for any number of callers."""

import asyncio
import contextlib
import logging

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.api.errors import CursorExpired, NotFound
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.client import RolloutClient

logger = logging.getLogger(__name__)

#: Seconds before a failed service is asked again.
PAUSE_S = 2.0


class ResultRouter:
    """Router that reads all results of a service in `keep_reading`, and passes them to waiting callers.

    Args:
        client: client of the service; its owner closes it.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._reading = asyncio.Event()

    async def ready(self) -> None:
        """Wait until results are read: no result of a later submission is missed."""
        await self._reading.wait()

    async def result(self, job_id: str) -> Result:
        """Return the result of a job that was submitted after `ready`. One caller per job."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = future
        try:
            return await future
        finally:
            del self._waiting[job_id]

    async def keep_reading(self) -> None:
        """Read results until cancelled; retries if the service fails."""
        after = None
        while True:
            try:
                if after is None:
                    after = (await self._client.status()).newest_cursor
                    self._reading.set()
                    await self._look_up()
                async for result in self._client.results(after):
                    after = result.cursor
                    self.hand_over(result)
            except CursorExpired as error:
                logger.warning("results went by unread: %s", error)
                after = None
            except ProrlError as error:
                logger.warning("asking again in %g s: %s", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)

    async def _look_up(self) -> None:
        """Request the awaited results: they may have been recorded while nothing was read."""
        for job_id in list(self._waiting):
            with contextlib.suppress(NotFound):  # not finished
                self.hand_over(await self._client.result(job_id))

    def waits_for(self, job_id: str) -> bool:
        """Return True if a caller waits for this result."""
        return job_id in self._waiting

    def hand_over(self, result: Result) -> None:
        """Pass a result to the caller that waits for it, if there is one."""
        future = self._waiting.get(result.job_id)
        if future is not None and not future.done():
            future.set_result(result)
