"""Rollouts for trainers with an event loop: any number of concurrent group requests.

    async with Rollouts(asking.url) as rollouts:
        results = await rollouts.group(asking.group("step7/3", task, 8))

If the waiting call stops early (its task is cancelled, a timeout expires), its group is cancelled at the
service. Groups that a trainer evicts therefore release their sandboxes and model servers.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.errors import NotFound, Retryable
from prorl_envs.rollout.api.types import GroupRequest, Result, job_id
from prorl_envs.rollout.api.views import GroupView
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.result_router import ResultRouter
from prorl_envs.trainers.asking import GroupTemplate, connect

logger = logging.getLogger(__name__)


class EpisodeFailed(ProrlError):
    """Error: all attempts at an episode failed. `result` is the result of the last attempt."""

    def __init__(self, result: Result) -> None:
        failure = result.failure
        super().__init__(
            f"{result.job_id} has no reward: {failure.kind}: {failure.message}" if failure else result.job_id,
            hint=failure.hint if failure else "",
        )
        self.result = result


#: Interval in which a waiting call checks that the service still knows the group, in seconds.
CHECK_S = 30.0


class Rollouts:
    """Results of one service, each delivered to the call that requested its group. An async context manager.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        patience_s: seconds for which the service may be unreachable before waiting calls fail.
    """

    def __init__(self, url: str, *, patience_s: float = 600.0) -> None:
        self._url = url
        self._patience_s = patience_s
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.client: RolloutClient = connect(self._url)
        self._inbox = ResultRouter(self.client)
        self._reading = asyncio.create_task(self._inbox.keep_reading())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections, after all pending cancellations were sent to the service. Idempotent."""
        while self._ending:
            await asyncio.wait(self._ending)
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self.client.aclose()

    async def group(self, request: GroupRequest, *, timeout_s: float | None = None) -> list[Result]:
        """Return the results of a group's samples, in order. The group is cancelled if the wait stops early.

        Args:
            request: request of the group; submitted here.
            timeout_s: seconds after which unfinished samples are cancelled; their results then have that
                state. None means no timeout.

        Raises:
            InputError: the service refuses the group, or has forgotten it.
            QueueFull, Unavailable: the service is full, or unreachable for longer than `patience_s`.
        """
        await self._ready()
        jobs = [job_id(request.id, sample) for sample in range(request.samples)]
        waiting = [asyncio.create_task(self._inbox.result(job)) for job in jobs]
        submitting = asyncio.create_task(self.client.submit([request]))
        try:
            await asyncio.shield(submitting)
            await self._all(request.id, waiting, timeout_s)
            return [one.result() for one in waiting]
        except BaseException:
            ending = asyncio.create_task(self._forget(request.id, submitting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        finally:
            for one in waiting:
                one.cancel()

    async def episode(
        self,
        asking: GroupTemplate,
        name: str,
        task: Mapping[str, Any],
        *,
        sampling: Sampling | None = None,
        attempts: int = 3,
    ) -> Result:
        """Return one graded episode, for trainers that request single samples and require a reward for each.
        A failed episode is requested again, as a new group with a new seed, sandbox and turns.

        Raises:
            EpisodeFailed: none of the attempts has a reward.
            InputError, QueueFull, Unavailable: as `group`.
        """
        for attempt in range(attempts):
            [result] = await self.group(asking.group(f"{name}/{attempt}", task, 1, sampling=sampling))
            if result.reward is not None:
                return result
        raise EpisodeFailed(result)

    async def _forget(self, group_id: str, submitting: asyncio.Task[list[GroupView]]) -> None:
        """Cancel an abandoned group, after its submission has completed."""
        await asyncio.wait([submitting])
        if submitting.exception() is None:
            await self._end(group_id)

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._inbox.ready()
        except TimeoutError:
            await self.client.status()  # raises the reason
            raise

    async def _all(
        self, group_id: str, waiting: Sequence[asyncio.Task[Result]], timeout_s: float | None
    ) -> None:
        """Return when all results have arrived."""
        began = heard = time.monotonic()
        ended = timeout_s is None
        while True:
            left = CHECK_S if ended else min(CHECK_S, max(0.0, began + (timeout_s or 0.0) - time.monotonic()))
            _, pending = await asyncio.wait(waiting, timeout=left)
            if not pending:
                return
            if not ended and time.monotonic() - began >= (timeout_s or 0.0):
                ended = True
                await self._end(group_id)
            try:
                await self._look_up(group_id)
                heard = time.monotonic()
            except Retryable:
                if time.monotonic() - heard > self._patience_s:
                    raise

    async def _look_up(self, group_id: str) -> None:
        """Deliver finished results that the result stream missed.

        Raises:
            NotFound: the service does not know the group any more, or no longer keeps a result.
            QueueFull, Unavailable: the service is unreachable.
        """
        for job in (await self.client.group(group_id)).jobs:
            if job.cursor is not None and self._inbox.waits_for(job.id):
                self._inbox.hand_over(await self.client.result(job.id))

    async def _end(self, group_id: str) -> None:
        try:
            await self.client.cancel_group(group_id)
        except NotFound:
            pass  # it was refused, or is forgotten
        except ProrlError as error:
            logger.warning("%s may continue at the service: %s", group_id, error)


#: Per event loop, by URL: for trainers that call a function or create an object for every sample.
_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Rollouts]] = (
    weakref.WeakKeyDictionary()
)


async def shared(url: str) -> Rollouts:
    """Return the shared connection of this event loop to a service; open until `close_shared` or the exit."""
    mine = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if url not in mine:
        mine[url] = await Rollouts(url).__aenter__()
    return mine[url]


async def close_shared() -> None:
    """Close the connections that `shared` opened in this event loop."""
    for rollouts in _SHARED.pop(asyncio.get_running_loop(), {}).values():
        await rollouts.aclose()
