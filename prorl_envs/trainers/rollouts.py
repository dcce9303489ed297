"""Rollouts for trainers that have an event loop: groups asked for one by one, any number at a time.

    async with Rollouts(asking.url) as rollouts:
        results = await rollouts.group(asking.group("step7/3", task, 8))

Whoever stops waiting (its task is cancelled, a time is up) has its group cancelled at the service, so that
what a trainer evicts holds no sandbox and no model server any longer.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from prorl_envs.errors import ProrlError
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.errors import Later, NotFound
from prorl_envs.rollout.inbox import Inbox
from prorl_envs.rollout.types import GroupRequest, Result, job_id
from prorl_envs.rollout.views import GroupView
from prorl_envs.trainers.asking import Asking, connect

logger = logging.getLogger(__name__)


class EpisodeFailed(ProrlError):
    """An episode has no reward, for all attempts. `result` says why, of the last one."""

    def __init__(self, result: Result) -> None:
        failure = result.failure
        super().__init__(
            f"{result.job_id} has no reward: {failure.kind}: {failure.message}" if failure else result.job_id,
            hint=failure.hint if failure else "",
        )
        self.result = result


#: Seconds after which somebody who still waits asks whether the service still knows the group.
CHECK_S = 30.0


class Rollouts:
    """The results of one service, each handed to whoever asked for its group. An async context manager.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        patience_s: seconds for which the service may be away before those who wait are told.
    """

    def __init__(self, url: str, *, patience_s: float = 600.0) -> None:
        self._url = url
        self._patience_s = patience_s
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.client: RolloutClient = connect(self._url)
        self._inbox = Inbox(self.client)
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
        """Close the connections, once the service was told of all that is cancelled. Idempotent."""
        while self._ending:
            await asyncio.wait(self._ending)
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self.client.aclose()

    async def group(self, request: GroupRequest, *, timeout_s: float | None = None) -> list[Result]:
        """The results of a group's samples, in order. Where it is not waited for to the end, it is cancelled.

        Args:
            request: of the group; submitted here.
            timeout_s: seconds after which those samples that are not done are cancelled; their results then
                say so. None waits as long as it takes.

        Raises:
            InputError: the service refuses the group, or has forgotten it.
            Full, Unavailable: the service is full, or away for longer than is waited for.
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
        asking: Asking,
        name: str,
        task: Mapping[str, Any],
        *,
        sampling: Sampling | None = None,
        attempts: int = 3,
    ) -> Result:
        """One graded episode, for trainers that ask sample by sample and must be given a reward for each.
        One that fails is asked for again, as another group: its seed, sandbox and turns are new.

        Raises:
            EpisodeFailed: none of the attempts has a reward.
            InputError, Full, Unavailable: as `group`.
        """
        for attempt in range(attempts):
            [result] = await self.group(asking.group(f"{name}/{attempt}", task, 1, sampling=sampling))
            if result.reward is not None:
                return result
        raise EpisodeFailed(result)

    async def _forget(self, group_id: str, submitting: asyncio.Task[list[GroupView]]) -> None:
        """End a group nobody waits for any more, once its submission cannot come after that."""
        await asyncio.wait([submitting])
        if submitting.exception() is None:
            await self._end(group_id)

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._inbox.ready()
        except TimeoutError:
            await self.client.status()  # says why
            raise

    async def _all(
        self, group_id: str, waiting: Sequence[asyncio.Task[Result]], timeout_s: float | None
    ) -> None:
        """Return once all results are there."""
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
            except Later:
                if time.monotonic() - heard > self._patience_s:
                    raise

    async def _look_up(self, group_id: str) -> None:
        """Hand over what is finished and went by unread.

        Raises:
            NotFound: the service does not know the group any more, or no longer keeps a result.
            Full, Unavailable: it is away.
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
            logger.warning("%s may go on at the service: %s", group_id, error)


#: Of each event loop, by URL: for trainers that call a function or make an object for every sample.
_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Rollouts]] = (
    weakref.WeakKeyDictionary()
)


async def shared(url: str) -> Rollouts:
    """The one connection of this event loop to a service. It stays open until `close_shared`, or the end."""
    mine = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if url not in mine:
        mine[url] = await Rollouts(url).__aenter__()
    return mine[url]


async def close_shared() -> None:
    """Close what `shared` opened in this event loop."""
    for rollouts in _SHARED.pop(asyncio.get_running_loop(), {}).values():
        await rollouts.aclose()
