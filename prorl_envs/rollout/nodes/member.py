"""A node at work: carries out what the head orders, with the same worker as a service of one machine."""

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
from prorl_envs.rollout import tracing
from prorl_envs.rollout.episode import Attempt, Episode
from prorl_envs.rollout.nodes.channel import Channel, ChannelClosed
from prorl_envs.rollout.nodes.messages import (
    Alive,
    Beat,
    Close,
    Closed,
    Collect,
    Collected,
    End,
    HangUp,
    Hold,
    Interrupt,
    Leaving,
    Perform,
    Performed,
    Refused,
    SampleAt,
    ToHead,
    ToNode,
    TurnFailed,
)
from prorl_envs.rollout.nodes.reports import short_report, whole_report
from prorl_envs.rollout.nodes.turns import RoutedModel
from prorl_envs.rollout.stages import Family
from prorl_envs.rollout.types import Failure, GroupRequest, Stage
from prorl_envs.rollout.worker import Worker

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Order:
    """An attempt, and the stage of it that runs."""

    episode: Episode
    stage: asyncio.Task[Failure | None] | None = None


class Member:
    """One node's part in a service.

    Args:
        channel: to the head, which knows us by now.
        worker: carries out stages.
        families: environment classes by name.
        model: samples where the head says.
        clock: measures silence.
        use: what this node uses of its machine now.
        beat_s, silent_s: as in `Welcome`.
    """

    def __init__(
        self,
        channel: Channel[ToHead, ToNode],
        worker: Worker,
        families: Mapping[str, Family],
        model: RoutedModel,
        clock: Clock,
        use: Callable[[], NodeUse],
        *,
        beat_s: float,
        silent_s: float,
    ) -> None:
        self._channel = channel
        self._worker = worker
        self._families = families
        self._model = model
        self._clock = clock
        self._use = use
        self._beat_s = beat_s
        self._silent_s = silent_s
        self._orders: dict[int, _Order] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Attempts that are here."""
        return len(self._orders)

    def leave(self) -> None:
        """Ask the head for no more jobs, and for the end when those that are here are done."""
        self._channel.send(Leaving())

    async def run(self) -> None:
        """Work until the head says that it is the end; then everything is closed.

        Raises:
            InputError: the head refuses this node.
            ChannelClosed: the head is gone. Everything is closed in this case too: what was done here is done
                again elsewhere.
        """
        beating = asyncio.create_task(self._beat())
        try:
            while not isinstance(message := await self._next(), End):
                self._heed(message)
        finally:
            beating.cancel()
            await asyncio.shield(asyncio.create_task(self._end()))

    async def _next(self) -> ToNode:
        try:
            async with self._clock.timeout(self._silent_s):
                return await self._channel.receive()
        except TimeoutError:
            raise ChannelClosed(f"the head has said nothing for {self._silent_s:g} s") from None

    def _heed(self, message: ToNode) -> None:
        match message:
            case Perform():
                self._perform(message)
            case Interrupt(order):
                if (known := self._orders.get(order)) and known.stage is not None:
                    known.stage.cancel()
            case Collect(order):
                if known := self._orders.get(order):
                    self._channel.send(Collected(order, whole_report(known.episode.attempt)))
            case Close(order):
                self._spawn(self._close(order))
            case SampleAt():
                self._model.sample_at(message)
            case HangUp():
                self._model.hang_up(message)
            case TurnFailed():
                self._model.failed(message)
            case Hold():
                self._model.hold(message)
            case Alive():
                pass
            case Refused(reason, hint):
                raise InputError(f"the service refuses this node: {reason}", hint=hint)
            case _:
                raise ChannelClosed(f"the head says {type(message).__name__}, which is for the beginning")

    def _perform(self, asked: Perform) -> None:
        try:
            order = self._orders.get(asked.order) or self._begin(asked)
        except (ValueError, InputError) as error:  # not this version's, or not this node's environments
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
        order = _Order(Episode(request, asked.sample, task, self._clock.monotonic(), asked.attempt))
        self._orders[asked.order] = order
        return order

    def _tell(self, asked: Perform, episode: Episode | None, failure: Failure | None) -> None:
        """Say what came of a stage."""
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
            self._channel.send(Beat({**asdict(self._use()), **process}))
            await self._clock.sleep(self._beat_s)

    async def _end(self) -> None:
        """End every stage and close every environment."""
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
            self._channel.close()  # the head does what is here elsewhere


def _resident_bytes() -> int:
    """Memory of this process (`statm`'s second field, proc(5), in pages)."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
