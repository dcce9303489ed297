"""The episodes a resources server holds: opened by a seed, used by tool calls, ended by a verdict.

Knows nothing of NeMo Gym, so it is tested without it. Two properties matter more than the rest:

- An agent posts to whatever route the model names, so a model can call `seed_session` or `verify` as if
  they were tools. Hence a session is seeded once (with another task: refused), graded once (asked again: the
  same answer), and an ended session stays ended.
- An agent that dies never says goodbye. Hence a session idle too long is ended, and its sandbox with it.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.env.responses import said_messages
from prorl_envs.errors import (
    Cancelled,
    EnvironmentFault,
    GraderError,
    InputError,
    ProrlError,
    RolloutFailure,
    StageTimeout,
)
from prorl_envs.tools.types import ToolCall, ToolResult

logger = logging.getLogger(__name__)

type AnyEnvironment = Environment[Any]


class SessionLost(EnvironmentFault):
    """No session under this id: never seeded here, forgotten, or the server restarted."""


class SessionExpired(EnvironmentFault):
    """The session was idle too long, and its sandbox is gone."""


class SessionsFull(EnvironmentFault):
    """As many episodes wait for a place as may wait."""

    retryable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Bounds of a server's sessions.

    Args:
        open: episodes, hence sandboxes, at one time; further seeds wait in order.
        waiting: seeds that may wait.
        remembered: ended sessions whose outcome is kept for a repeated request.
        idle_s: seconds without a request after which a session is ended.
        init_s, eval_s: seconds the start and the grader may take; waiting for a place does not count.
    """

    open: int = 64
    waiting: int = 4096
    remembered: int = 16_384
    idle_s: float = 1800.0
    init_s: float = 600.0
    eval_s: float = 900.0


@dataclass(slots=True, eq=False)
class Session:
    """One open episode. `turns` counts model answers, for callers that step through them."""

    row: Mapping[str, Any]
    task: Task
    environment: AnyEnvironment
    last_used: float
    prompt: Prompt | None = None
    turns: int = 0
    placed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session ended: with a grade, or why without one."""

    task_id: str
    outcome: Grade | RolloutFailure


class Sessions:
    """The open and the recently ended episodes of one family, by session id.

    Args:
        make: gives a new, single-use environment.
        limits: what may grow how far.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        make: Callable[[], AnyEnvironment],
        limits: SessionLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._limits = limits
        self._clock = clock
        self._places = asyncio.Semaphore(limits.open)
        self._waiting = 0
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, session_id: str) -> Session:
        """The open session under `session_id`.

        Raises:
            SessionLost: there is none.
            RolloutFailure: it ended without a grade, and this is why.
            InputError: it ended with a grade.
        """
        if (session := self._open.get(session_id)) is not None:
            return session
        if (ended := self._ended.get(session_id)) is None:
            raise SessionLost(
                "no such session", hint="seed it first, and send its cookies with every request"
            )
        if isinstance(ended.outcome, RolloutFailure):
            raise ended.outcome
        raise InputError("this session has been graded and is over", hint="seed a new one")

    def ended(self, session_id: str) -> Ended | None:
        """How the session under `session_id` ended, as far as that is remembered."""
        return self._ended.get(session_id)

    async def open(self, session_id: str, row: Mapping[str, Any]) -> Prompt:
        """Start an episode of the task in `row`, in its turn. The same seed again finds the same session.

        Raises:
            InputError: the row is wrong, or the session has another task or has ended.
            RolloutFailure: the episode did not start; the session has ended with this failure.
        """
        if session_id in self._ended:
            raise InputError("this session has ended", hint="start an episode without session cookies")
        if (known := self._open.get(session_id)) is not None:
            return await self._reopened(session_id, known, row)
        environment = self._make()
        session = Session(row, environment.load(row), environment, self._clock())
        self._open[session_id] = session
        async with session.lock:
            try:
                await self._take_place(session)
                starting = environment.init(session.task)
                session.prompt = await _within(starting, self._limits.init_s, "The start")
            except BaseException as error:
                await self._end(session_id, session, _failure(error))
                raise
            session.last_used = self._clock()
            return session.prompt

    async def call(self, session_id: str, call: ToolCall) -> ToolResult:
        """Run one tool call; calls of one session run one after another.

        Raises:
            InputError, RolloutFailure: as `get`, or the call's own failure, which ends the session.
        """
        session = self.get(session_id)
        async with session.lock:
            self.get(session_id)
            try:
                return await session.environment.call(call)
            except BaseException as error:
                await self._end(session_id, session, _failure(error))
                raise
            finally:
                session.last_used = self._clock()

    async def grade(self, session_id: str, output: Sequence[Mapping[str, Any]] = ()) -> Grade:
        """Grade the episode and end it. Asked again, the answer is the same.

        Args:
            output: what the model said and called, as items of the Responses API.

        Raises:
            RolloutFailure: there is no grade, and this is why.
        """
        if (session := self._open.get(session_id)) is None:
            return self._graded(session_id)
        async with session.lock:
            if session_id in self._ended:
                return self._graded(session_id)
            try:
                _tell(session, output)
                grade = await _within(session.environment.eval(), self._limits.eval_s, "The grader")
                if not math.isfinite(grade.reward):
                    raise GraderError(f"the grader answered {grade.reward}, which is no reward")
            except BaseException as error:
                await self._end(session_id, session, _failure(error))
                raise
            await self._end(session_id, session, grade)
            return grade

    async def expire(self) -> int:
        """End the sessions idle for longer than the limit, and say how many."""
        oldest = self._clock() - self._limits.idle_s
        idle = [
            (key, one) for key, one in self._open.items() if not one.lock.locked() and one.last_used < oldest
        ]
        for session_id, session in idle:
            reason = f"the session was idle for more than {self._limits.idle_s:g} s"
            await self._end(session_id, session, SessionExpired(reason))
        return len(idle)

    async def keep_expiring(self) -> None:
        """Expire for ever, often enough that no idle session outlives its limit by much."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s / 4, 30.0))
            await self.expire()

    async def end(self, session_id: str) -> None:
        """End a session that nobody wants graded. Idempotent."""
        if (session := self._open.get(session_id)) is not None:
            await self._end(session_id, session, Cancelled("the session was closed before it was graded"))

    async def aclose(self) -> None:
        """End every session."""
        for session_id in list(self._open):
            await self.end(session_id)

    async def _reopened(self, session_id: str, known: Session, row: Mapping[str, Any]) -> Prompt:
        if known.row != row:
            raise InputError("this session already has another task", hint="one session is one episode")
        async with known.lock:
            prompt = self.get(session_id).prompt
        if prompt is None:  # unreachable while the lock covers the start; said for the type checker
            raise SessionLost("the session did not start")
        return prompt

    def _graded(self, session_id: str) -> Grade:
        ended = self._ended.get(session_id)
        if ended is not None and isinstance(ended.outcome, Grade):
            return ended.outcome
        self.get(session_id)  # raises the failure
        raise SessionLost("no such session")

    async def _take_place(self, session: Session) -> None:
        if self._places.locked() and self._waiting >= self._limits.waiting:
            raise SessionsFull(
                f"{self._waiting} episodes wait already", hint="lower the concurrency, or raise max_sessions"
            )
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        session.placed = True

    async def _end(self, session_id: str, session: Session, outcome: Grade | RolloutFailure) -> None:
        """Record the outcome first, then close: a repeated request never finds a half-closed session."""
        if self._open.pop(session_id, None) is None:
            return
        self._ended[session_id] = Ended(session.task.id, outcome)
        while len(self._ended) > self._limits.remembered:
            self._ended.popitem(last=False)
        try:
            await session.environment.close()
        except ProrlError as error:
            # The outcome stands. The driver still holds what did not close, and ends it with the server.
            logger.error("closing %s: %s", session.task.id, error)
        finally:
            if session.placed:
                self._places.release()


def _tell(session: Session, output: Sequence[Mapping[str, Any]]) -> None:
    """Tell the environment what was said. Some agents pass on what is no conversation; most environments do
    not listen, so what cannot be read is not told."""
    prompt = session.prompt.messages if session.prompt else ()
    try:
        session.environment.listen((*prompt, *said_messages(output)))
    except InputError as error:
        logger.warning("the conversation cannot be read: %s", error)


async def _within[T](work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
    try:
        async with asyncio.timeout(seconds) as scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise StageTimeout(f"{what} took longer than {seconds:g} s") from error


def _failure(error: BaseException) -> RolloutFailure:
    """What is recorded of a session that `error` ended."""
    if isinstance(error, RolloutFailure):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the request was cancelled")
    return RolloutFailure(f"unexpected {type(error).__name__}: {error}")
