"""The results of a rollout service, each handed to whoever waits for it: one connection for any number."""

import asyncio
import contextlib
import logging

from prorl_envs.errors import ProrlError
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.errors import CursorExpired, NotFound
from prorl_envs.rollout.types import Result

logger = logging.getLogger(__name__)

#: Seconds before a service that failed is asked again.
PAUSE_S = 2.0


class Inbox:
    """Reads everything that a service finishes while `keep_reading` runs, and keeps what is waited for.

    Args:
        client: of the service; stays its owner's.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._reading = asyncio.Event()

    async def ready(self) -> None:
        """Return once results are read: what is submitted from then on is not missed."""
        await self._reading.wait()

    async def result(self, job_id: str) -> Result:
        """The result of a job that was submitted after `ready`, and is waited for once."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[job_id] = future
        try:
            return await future
        finally:
            del self._waiting[job_id]

    async def keep_reading(self) -> None:
        """Read until cancelled, whatever becomes of the service meanwhile."""
        after = None
        while True:
            try:
                if after is None:
                    after = (await self._client.status()).newest
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
        """Ask for what is waited for: it may have gone by."""
        for job_id in list(self._waiting):
            with contextlib.suppress(NotFound):  # not finished
                self.hand_over(await self._client.result(job_id))

    def waits_for(self, job_id: str) -> bool:
        """Somebody waits for this result."""
        return job_id in self._waiting

    def hand_over(self, result: Result) -> None:
        """Give a result to whoever waits for it, if anybody does."""
        future = self._waiting.get(result.job_id)
        if future is not None and not future.done():
            future.set_result(result)
