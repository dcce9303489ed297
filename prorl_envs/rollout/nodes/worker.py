"""Node worker: runs the stages that the head orders, with the stage worker of a service on one machine."""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.env.base import Task
from prorl_envs.env.node import Node
from prorl_envs.errors import FailureKind, InputError, ModelError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import ModelClient
from prorl_envs.rollout.agent import tracing
from prorl_envs.rollout.agent.agent_loop import Agent, TurnJournal
from prorl_envs.rollout.api.types import Failure, JobState, Result, Stage
from prorl_envs.rollout.episode.job import Job
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.nodes.messages import (
    Hold,
    NodeInfo,
    NodeMessage,
    ServerChoice,
    StageOrder,
    StageOutcome,
    Terms,
    TurnOutcome,
    TurnSampled,
)
from prorl_envs.rollout.nodes.remote_sampling import RoutedModel
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.tools.types import ToolSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeResources:
    """Resources of a node.

    Args:
        node: starts this machine's sandboxes.
        families: environment classes by name.
        renderer: the model's tokenizer and chat template.
        connect: creates the client of a model server from its URL.
    """

    node: Node
    families: Mapping[str, Family]
    renderer: TemplateRenderer
    connect: Callable[[str], ModelClient]


type OpenResources = Callable[[Terms], AbstractAsyncContextManager[NodeResources]]


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt, and its running stage."""

    job: Job
    stage: asyncio.Task[Failure | None] | None = None
    interrupted: bool = False


class NodeWorker:
    """Node, as the head calls it. The head's calls raise `NodeLost` if the node is gone.

    Calls may overtake each other. The transport never repeats a call.

    Args:
        resources: opens the resources of the node for the head's terms; `shutdown` closes them.
        limits: concurrency limits of this node.
        clock: measures deadlines, and the time since the head's last call.

    Attributes:
        stopped: set when `shutdown` has finished.
    """

    def __init__(self, resources: OpenResources, limits: StageLimits, clock: Clock | None = None) -> None:
        self.stopped = asyncio.Event()
        self._open = resources
        self._limits = limits
        self._clock = clock or SystemClock()
        self._stack = AsyncExitStack()
        self._attempts: dict[int, _Attempt] = {}
        self._called_at = self._clock.monotonic()
        self._shutdown: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of attempts on this node."""
        return len(self._attempts)

    async def prepare(self, terms: Terms) -> NodeInfo:
        """Prepare the node. Must be the first call.

        Raises:
            InputError: the tokenizer or an environment is missing on the node.
            SandboxError: the machine cannot run sandboxes.
        """
        self._resources = opened = await self._stack.enter_async_context(self._open(terms))
        self._model = RoutedModel(opened.connect, self._clock)
        self._stack.push_async_callback(self._model.aclose)
        self._worker = Worker(
            opened.node,
            opened.families,
            Agent(opened.renderer, self._model, self._clock, terms.reasoning),
            self._clock,
            grace_s=terms.grace_s,
            close_s=terms.close_s,
        )
        self._called_at = self._clock.monotonic()
        self._watchdog = asyncio.create_task(self._shut_down_when_silent(terms.heartbeat_timeout_s))
        limits = self._limits.at_most(opened.node.max_sandboxes)
        return NodeInfo(__version__, limits, sorted(opened.families), fingerprint(opened.renderer))

    async def perform(self, order: StageOrder) -> StageOutcome:
        """Run a stage. Even after an interrupt, this returns only when no part of the stage runs any more."""
        try:
            attempt = self._attempts.get(order.order) or self._new_attempt(order)
        except InputError as error:
            problem = f"the node cannot read the job: {error}"
            unreadable = Failure(kind=FailureKind.ENVIRONMENT, stage=order.stage, message=problem)
            return StageOutcome(unreadable)
        attempt.interrupted = False
        job, worker = attempt.job, self._worker
        work = worker.step(job, order.step) if order.caller else worker.perform(job, order.stage)
        with tracing.continued(job.id, dict(order.trace)):
            stage = attempt.stage = asyncio.create_task(work)
        await asyncio.wait({stage})
        attempt.stage = None
        failure = None if stage.cancelled() else stage.result()
        graded = order.stage is Stage.EVAL and failure is None
        return StageOutcome(failure, job.result(JobState.DONE, whole=graded), job.attempt.progress)

    async def interrupt(self, order: int) -> bool:
        """Cancel the running stage of an attempt. Return False if no stage is running, or none yet."""
        attempt = self._attempts.get(order)
        if attempt is None or attempt.stage is None:
            return False
        if not attempt.interrupted:  # a second cancellation would interrupt the cleanup
            attempt.interrupted = True
            attempt.stage.cancel()
        return True

    async def collect(self, order: int) -> Result | None:
        """Return the partial result of an attempt; None if the node does not know it."""
        attempt = self._attempts.get(order)
        return attempt.job.result(JobState.DONE) if attempt is not None else None

    async def close(self, order: int) -> bool:
        """Close the attempt's environment and forget the attempt. Return False if closing failed."""
        attempt = self._attempts.pop(order, None)
        return attempt is None or await self._worker.close(attempt.job)

    async def forget(self, group: str) -> None:
        """See `StageExecutor.forget`."""
        await self._worker.forget(group)

    async def hold(self, hold: Hold) -> None:
        """Hold the turns of this node while weights change, or release them."""
        self._model.hold(hold)

    async def messages(self) -> list[NodeMessage]:
        """Return the node's next messages, oldest first. Waits for the first one."""
        return await self._model.messages()

    async def sample(self, turn: int, call: int, server: ServerChoice) -> TurnOutcome:
        """Sample a turn on a model server. The tokens stay on the node.

        Args:
            call: number of this call among the calls of the turn, from 1.
        """
        return await self._model.sample(turn, call, server)

    async def stop_turn(self, turn: int, call: int, error: ModelError | None = None) -> None:
        """Stop the calls of a turn up to number `call`, and discard their tokens. Returns when all stopped.

        Args:
            error: if given, the turn fails with this error, since no server can sample it. Otherwise the turn
                is routed again.
        """
        await self._model.stop_turn(turn, call, error)

    async def usage(self) -> dict[str, float]:
        """Return the fields of `env.node.NodeUse`, and the process's `pid`, `cpu_s` and `memory` (bytes). A
        node that does not answer in time is considered lost."""
        self._called_at = self._clock.monotonic()
        process = {"pid": os.getpid(), "cpu_s": time.process_time(), "memory": _resident_bytes()}
        return {**asdict(self._resources.node.use), **process}

    async def shutdown(self) -> None:
        """Stop every stage, close every environment and release the node's resources. Idempotent."""
        self._shutdown = self._shutdown or asyncio.create_task(self._close_all())
        await asyncio.shield(self._shutdown)

    def _new_attempt(self, order: StageOrder) -> _Attempt:
        """Create the attempt of an INIT.

        Raises:
            InputError: the node does not know the attempt or its environment, or the task row is invalid.
        """
        if order.request is None:
            raise InputError(f"the node has no attempt {order.order}")
        family = self._resources.families.get(order.request.environment)
        if family is None:
            raise InputError(f"the node has no environment {order.request.environment!r}")
        task: Task = family.load(order.request.task)
        job = Job(order.request, order.sample, task, self._clock.monotonic(), recorded=order.recorded)
        job.journal = TurnJournal(
            order.answers, lambda *turn: self._model.send(TurnSampled(order.order, *turn))
        )
        attempt = self._attempts[order.order] = _Attempt(job)
        return attempt

    async def _shut_down_when_silent(self, heartbeat_timeout_s: float) -> None:
        """Shut down if the head has not called for too long. It then retries the attempts on other nodes."""
        while (silent_s := self._clock.monotonic() - self._called_at) < heartbeat_timeout_s:
            await self._clock.sleep(heartbeat_timeout_s - silent_s)
        log.warning("the head has not called for %g s: shutting down", heartbeat_timeout_s)
        await self.shutdown()

    async def _close_all(self) -> None:
        """Cancel every stage and close every environment."""
        stages = {attempt.stage for attempt in self._attempts.values() if attempt.stage is not None}
        for stage in stages:
            stage.cancel()
        if stages:
            await asyncio.wait(stages)
        await asyncio.gather(*(self.close(order) for order in list(self._attempts)))
        await self._stack.aclose()
        self.stopped.set()
        if self._watchdog is not None:
            self._watchdog.cancel()


def fingerprint(renderer: TemplateRenderer) -> str:
    """Return a hash of the tokens of a sample conversation with a tool. Renderers with different hashes would
    make different trajectories of the same episode."""
    messages = [
        {"role": "system", "content": "Be exact: 0123456789 äöü 漢字 \n\t{}[]<>"},
        {"role": "user", "content": "def f(x):\n    return x ** 2  # naïve"},
    ]
    tool = ToolSpec("bash", "Run it.", {"type": "object", "properties": {"command": {"type": "string"}}})
    ids = renderer.prompt(messages, [tool])
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()


def _resident_bytes() -> int:
    """Return the resident memory of this process (`statm`'s second field, proc(5), in pages)."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
