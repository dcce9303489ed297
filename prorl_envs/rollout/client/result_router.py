"""Router of results to waiting callers, with one connection to the service for any number of callers."""

import asyncio
import contextlib
import logging

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.api.errors import CursorExpired, NotFound
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.client import Processed, RolloutClient

logger = logging.getLogger(__name__)

#: Seconds before a failed request is repeated, and seconds for which a request waits for results.
PAUSE_S, WAIT_S = 2.0, 20.0


class ResultRouter:
    """Router that reads all results of a service in `keep_reading`, and passes them to waiting callers. It
    acknowledges only results that it passed on, since the others belong to other readers.

    Args:
        client: client of the service; its owner closes it.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._reading = asyncio.Event()

    async def ready(self) -> None:
        """Wait until results are read. Then no result of a later submission is missed."""
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
        """Read results until cancelled. Failed requests are repeated."""
        processed = Processed(self._client)
        try:
            await self._keep_reading(processed)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await processed.acknowledge()

    async def _keep_reading(self, processed: Processed) -> None:
        after = None
        while True:
            try:
                if after is None:
                    after = (await self._client.status()).newest_cursor
                    self._reading.set()
                    await self._look_up()
                while True:
                    page = await self._client.page(after, wait_s=WAIT_S, acknowledge=False)
                    for result in page.results:
                        if self.hand_over(result):
                            await processed.add(result)
                    after = page.next
                    if not page.results:
                        await processed.acknowledge()
            except CursorExpired as error:
                logger.warning("some results were dropped before they were read: %s", error)
                after = None
            except ProrlError as error:
                logger.warning("reading results fails; next try in %g s: %s", PAUSE_S, error)
                await asyncio.sleep(PAUSE_S)

    async def _look_up(self) -> None:
        """Request every awaited result once, since it may have been recorded while nothing was read."""
        for job_id in list(self._waiting):
            with contextlib.suppress(NotFound):  # not finished
                self.hand_over(await self._client.result(job_id))

    def waits_for(self, job_id: str) -> bool:
        """Return True if a caller waits for this result."""
        return job_id in self._waiting

    def hand_over(self, result: Result) -> bool:
        """Pass a result to the caller that waits for it. Return False if no caller waits for it."""
        future = self._waiting.get(result.job_id)
        if future is None or future.done():
            return False
        future.set_result(result)
        return True
