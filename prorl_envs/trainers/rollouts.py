"""Rollouts for trainers with an event loop, with any number of concurrent group requests.

    async with Rollouts(template.url) as rollouts:
        results = await rollouts.group(template.group("step7/3", task, 8))

If a call stops early, because its task is cancelled or a timeout expires, its group is cancelled at the
service. So groups that a trainer drops release their sandboxes and model servers.
"""

import asyncio
import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.errors import NotFound, Retryable
from prorl_envs.rollout.api.types import GroupRequest, Result, Selection, job_id
from prorl_envs.rollout.api.views import GroupView
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.result_router import ResultRouter
from prorl_envs.trainers.asking import GroupTemplate, connect
from prorl_envs.trainers.rows import training_reward

logger = logging.getLogger(__name__)


class EpisodeFailed(ProrlError):
    """Error: all attempts of an episode failed. `result` is the result of the last attempt."""

    def __init__(self, result: Result) -> None:
        failure = result.failure
        super().__init__(
            f"{result.job_id} has no reward: {failure.kind}: {failure.message}"
            if failure
            else f"{result.job_id} has no tokens to train on",
            hint=failure.hint if failure else "see token_exact and drift of its rows",
        )
        self.result = result


#: Seconds between two checks that the service still knows the group for which a call waits.
CHECK_S = 30.0


class Rollouts:
    """Async context manager that requests groups, and returns each result to the call that requested it.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        patience_s: seconds for which the service may be unreachable before waiting calls fail.
    """

    def __init__(self, url: str, *, patience_s: float = 600.0) -> None:
        self._url = url
        self._patience_s = patience_s
        self._cancellations: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.client: RolloutClient = connect(self._url)
        self._router = ResultRouter(self.client)
        self._reading = asyncio.create_task(self._router.keep_reading())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Send all pending cancellations to the service, then close the connections. Idempotent."""
        await self.settle()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self.client.aclose()

    async def settle(self) -> None:
        """Wait until all pending cancellations have been sent to the service."""
        while self._cancellations:
            await asyncio.wait(self._cancellations)

    async def group(
        self, request: GroupRequest, *, timeout_s: float | None = None, keep: bool = False
    ) -> list[Result]:
        """Submit a group, and return its results in order. A group that was submitted before is not run
        again. If this call stops early, the group is cancelled.

        Args:
            request: request for the group.
            timeout_s: seconds after which unfinished samples are cancelled, so that their results have the
                state `cancelled`. None means no timeout.
            keep: if this call stops early, the group continues, for a later call with the same request.

        Raises:
            InputError: the service refuses the group, or no longer knows it.
            QueueFull, Unavailable: the service is full, or unreachable for longer than `patience_s`.
        """
        await self.ready(self._patience_s)
        jobs = [job_id(request.id, sample) for sample in range(request.samples)]
        waiting = [asyncio.create_task(self._router.result(job)) for job in jobs]
        submitting = asyncio.create_task(self.client.submit([request]))
        try:
            [view] = await asyncio.shield(submitting)
            await self._hand_over(view)
            await self._wait_for_all(request.id, waiting, timeout_s)
            return [wait.result() for wait in waiting]
        except BaseException:
            if not keep:
                cancellation = asyncio.create_task(self._abandon(request.id, submitting))
                self._cancellations.add(cancellation)
                cancellation.add_done_callback(self._cancellations.discard)
            raise
        finally:
            for wait in waiting:
                wait.cancel()

    async def episode(
        self,
        template: GroupTemplate,
        name: str,
        task: Mapping[str, Any],
        *,
        sampling: Sampling | None = None,
        attempts: int = 3,
    ) -> Result:
        """Return one graded episode, for trainers that request single samples and require a reward for each.
        An episode that failed or cannot be trained on is requested again, as a new group.

        Raises:
            EpisodeFailed: no attempt can be trained on.
            InputError, QueueFull, Unavailable: see `group`.
        """
        for attempt in range(attempts):
            [result] = await self.group(template.group(f"{name}/{attempt}", task, 1, sampling=sampling))
            if training_reward(result) is not None:
                return result
        raise EpisodeFailed(result)

    async def _abandon(self, group_id: str, submitting: asyncio.Task[list[GroupView]]) -> None:
        """Cancel a group that no call waits for any more, after its submission has completed."""
        await asyncio.wait([submitting])
        if submitting.exception() is None:
            await self._cancel(group_id)

    async def ready(self, patience_s: float) -> None:
        """Wait until results are read.

        Raises:
            InputError, Unavailable, TimeoutError: the service does not answer within `patience_s` seconds.
        """
        try:
            async with asyncio.timeout(patience_s):
                await self._router.ready()
        except TimeoutError:
            await self.client.status()  # usually raises a more specific error
            raise

    async def _wait_for_all(
        self, group_id: str, waiting: Sequence[asyncio.Task[Result]], timeout_s: float | None
    ) -> None:
        """Wait until all results have arrived."""
        last_contact = time.monotonic()
        deadline = math.inf if timeout_s is None else last_contact + timeout_s
        while True:
            seconds = min(CHECK_S, max(0.0, deadline - time.monotonic()))
            _, pending = await asyncio.wait(waiting, timeout=seconds)
            if not pending:
                return
            if time.monotonic() >= deadline:
                deadline = math.inf
                await self._cancel(group_id)
            try:
                await self._hand_over(await self.client.group(group_id))
                last_contact = time.monotonic()
            except Retryable:
                if time.monotonic() - last_contact > self._patience_s:
                    raise

    async def _hand_over(self, group: GroupView) -> None:
        """Request finished results that the router missed, or that existed before the submission.

        Raises:
            NotFound: the service no longer stores one of the results.
            QueueFull, Unavailable: the service is unreachable.
        """
        only = Selection(groups=frozenset({group.id}))
        for job in group.jobs:
            if job.cursor is not None and self._router.waits_for(job.id):
                self._router.hand_over(await self.client.result(job.id))
                await self.client.acknowledge(job.cursor - 1, job.cursor, only=only)

    async def _cancel(self, group_id: str) -> None:
        try:
            await self.client.cancel_group(group_id)
        except NotFound:
            pass  # the group was refused, or the service no longer knows it
        except ProrlError as error:
            logger.warning("%s may continue at the service: %s", group_id, error)


#: Connections by event loop and URL, for trainers that call a function or create an object for every sample.
_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Rollouts]] = (
    weakref.WeakKeyDictionary()
)


async def shared(url: str) -> Rollouts:
    """Return this event loop's shared connection to a service. It stays open until `close_shared`."""
    connections = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if url not in connections:
        connections[url] = await Rollouts(url).__aenter__()
    return connections[url]


async def close_shared() -> None:
    """Close the connections that `shared` opened in this event loop."""
    for rollouts in _SHARED.pop(asyncio.get_running_loop(), {}).values():
        await rollouts.aclose()
