"""Node worker: carries out the head's orders, with the same stage worker as a service on one machine."""

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prorl_envs.clock import Clock
from prorl_envs.env.base import Task
from prorl_envs.env.node import NodeUse
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.api.types import Failure, GroupRequest, Stage
from prorl_envs.rollout.episode.job import Attempt, Job
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.nodes.channel import ChannelClosed, NodeChannel
from prorl_envs.rollout.nodes.messages import (
    CancelTurn,
    Closed,
    CloseJob,
    Collect,
    Collected,
    DrainRequest,
    HeadHeartbeat,
    Hold,
    InterruptJob,
    JoinRefused,
    NodeHeartbeat,
    Perform,
    Performed,
    SampleAt,
    Shutdown,
    ToHead,
    ToNode,
    TurnFailed,
)
from prorl_envs.rollout.nodes.remote_sampling import RoutedModel
from prorl_envs.rollout.nodes.result_codec import short_report, whole_report

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Order:
    """An attempt, and its running stage."""

    episode: Job
    stage: asyncio.Task[Failure | None] | None = None


class NodeWorker:
    """One node's part in a service.

    Args:
        channel: to the head, after joining.
        worker: carries out stages.
        families: environment classes by name.
        model: samples on the servers that the head chooses.
        clock: measures silence.
        use: returns this node's current use of its machine.
        heartbeat_s, heartbeat_timeout_s: as in `Hello`.
    """

    def __init__(
        self,
        channel: NodeChannel[ToHead, ToNode],
        worker: Worker,
        families: Mapping[str, Family],
        model: RoutedModel,
        clock: Clock,
        use: Callable[[], NodeUse],
        *,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
    ) -> None:
        self._channel = channel
        self._worker = worker
        self._families = families
        self._model = model
        self._clock = clock
        self._use = use
        self._heartbeat_s = heartbeat_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._orders: dict[int, _Order] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Return the number of attempts on this node."""
        return len(self._orders)

    def leave(self) -> None:
        """Ask the head for no more jobs, and for a shutdown when the current jobs are done."""
        self._channel.send(DrainRequest())

    async def run(self) -> None:
        """Work until the head sends `Shutdown`, then close everything.

        Raises:
            InputError: the head refuses this node.
            ChannelClosed: the connection to the head is lost. Everything is closed in this case too: the head
                retries the attempts of this node elsewhere.
        """
        beating = asyncio.create_task(self._beat())
        try:
            while not isinstance(message := await self._next(), Shutdown):
                self._heed(message)
        finally:
            beating.cancel()
            await asyncio.shield(asyncio.create_task(self._end()))

    async def _next(self) -> ToNode:
        try:
            async with self._clock.timeout(self._heartbeat_timeout_s):
                return await self._channel.receive()
        except TimeoutError:
            raise ChannelClosed(f"the head has said nothing for {self._heartbeat_timeout_s:g} s") from None

    def _heed(self, message: ToNode) -> None:
        match message:
            case Perform():
                self._perform(message)
            case InterruptJob(order):
                if (known := self._orders.get(order)) and known.stage is not None:
                    known.stage.cancel()
            case Collect(order):
                if known := self._orders.get(order):
                    self._channel.send(Collected(order, whole_report(known.episode.attempt)))
            case CloseJob(order):
                self._spawn(self._close(order))
            case SampleAt():
                self._model.sample_at(message)
            case CancelTurn():
                self._model.hang_up(message)
            case TurnFailed():
                self._model.failed(message)
            case Hold():
                self._model.hold(message)
            case HeadHeartbeat():
                pass
            case JoinRefused(reason, hint):
                raise InputError(f"the service refuses this node: {reason}", hint=hint)
            case _:
                raise ChannelClosed(f"the head says {type(message).__name__}, which is for the beginning")

    def _perform(self, asked: Perform) -> None:
        try:
            order = self._orders.get(asked.order) or self._begin(asked)
        except (ValueError, InputError) as error:  # of another version, or of an environment unknown here
            problem = f"the node cannot read the job: {error}"
            failure = Failure(kind=FailureKind.ENVIRONMENT, stage=asked.stage, message=problem)
            self._tell(asked, None, failure)
            return
        with tracing.continued(order.episode.id, asked.trace):
            order.stage = self._spawn(self._worker.perform(order.episode, asked.stage))
        order.stage.add_done_callback(partial(self._performed, asked, order))

    def _performed(self, asked: Perform, order: _Order, stage: asyncio.Task[Failure | None]) -> None:
        order.stage = None
        self._tell(asked, order.episode, None if stage.cancelled() else stage.result())

    def _begin(self, asked: Perform) -> _Order:
        request = GroupRequest.model_validate(json.loads(asked.request))
        family = self._families.get(request.environment)
        if family is None:
            raise InputError(f"environment {request.environment!r} is not known here")
        task: Task = family.load(request.task)
        order = _Order(Job(request, asked.sample, task, self._clock.monotonic(), asked.attempt))
        self._orders[asked.order] = order
        return order

    def _tell(self, asked: Perform, episode: Job | None, failure: Failure | None) -> None:
        """Report the outcome of a stage."""
        if episode is None:
            seconds, report = 0.0, short_report(Attempt())
        else:
            seconds = episode.active_s[asked.stage]
            graded = asked.stage is Stage.EVAL and failure is None
            report = (whole_report if graded else short_report)(episode.attempt)
        text = failure.model_dump_json().encode() if failure else b""
        self._channel.send(Performed(asked.order, seconds, text, report))

    async def _close(self, order: int) -> None:
        known = self._orders.pop(order, None)
        ok = known is None or await self._worker.close(known.episode)
        self._channel.send(Closed(order, ok))

    async def _beat(self) -> None:
        while True:
            process = {"pid": os.getpid(), "cpu_s": time.process_time(), "memory": _resident_bytes()}
            self._channel.send(NodeHeartbeat({**asdict(self._use()), **process}))
            await self._clock.sleep(self._heartbeat_s)

    async def _end(self) -> None:
        """Cancel every stage and close every environment."""
        for order in self._orders.values():
            if order.stage is not None:
                order.stage.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(self._close(order) for order in list(self._orders)))
        with contextlib.suppress(ChannelClosed):
            self._channel.close()

    def _spawn[T](self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the node met a bug", exc_info=error)
            self._channel.close()  # the head then retries this node's attempts elsewhere


def _resident_bytes() -> int:
    """Return the resident memory of this process (`statm`'s second field, proc(5), in pages)."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
