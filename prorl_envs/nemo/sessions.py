"""Episodes of a resources server: opened by a seed, used by tool calls, closed by a verdict.

Independent of NeMo Gym, so that tests do not need it. Two properties matter most:

- An agent posts to any route that the model names, so a model can call `seed_session` or `verify` as if they
  were tools. Therefore a session stores a digest of its task row (`may_belong`; see `routes.py`), is seeded
  once (another task is refused) and graded once (a repeated request gets the same answer), and stays closed.
- An agent that dies sends no message. Therefore a session that is idle too long is closed, with its sandbox.
"""

import asyncio
import hashlib
import json
import logging
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
    InputError,
    ProrlError,
    RolloutFailure,
    StageTimeout,
)
from prorl_envs.tools.types import ToolCall, ToolResult

logger = logging.getLogger(__name__)

type AnyEnvironment = Environment[Any]


class SessionLost(EnvironmentFault):
    """Error: no session has this id. It was never seeded here, its outcome is no longer kept, or the server
    restarted."""


class SessionExpired(EnvironmentFault):
    """Error: the session was idle too long, and its sandbox is closed."""


class SessionsFull(EnvironmentFault):
    """Error: the queue of waiting episodes is full."""

    retryable: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of a server's sessions.

    Args:
        open: maximum concurrent episodes, and so sandboxes; further seeds wait in order.
        waiting: maximum number of waiting seeds.
        remembered: maximum number of closed sessions whose outcomes are kept for repeated requests.
        idle_s: seconds without a request after which a session is closed.
        init_s, eval_s: timeouts of the start and of the grader in seconds, without the wait in the queue.
    """

    open: int = 64
    waiting: int = 4096
    remembered: int = 16_384
    idle_s: float = 1800.0
    init_s: float = 600.0
    eval_s: float = 900.0


@dataclass(slots=True, eq=False)
class NemoSession:
    """One open episode. `turns` counts model answers, for callers that step through them."""

    row_digest: str
    task: Task
    environment: AnyEnvironment
    last_used: float
    prompt: Prompt | None = None
    turns: int = 0
    has_slot: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Outcome of a closed session: its grade, or the failure."""

    row_digest: str
    task_id: str
    outcome: Grade | RolloutFailure


class Sessions:
    """The open and the recently closed episodes of one family, by session id.

    Args:
        make: creates a new, single-use environment.
        limits: limits of the sessions.
        clock: returns monotonic seconds.
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
        self._slots = asyncio.Semaphore(limits.open)
        self._waiting = 0
        self._open: dict[str, NemoSession] = {}
        self._ended: OrderedDict[str, SessionEnded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, session_id: str) -> NemoSession:
        """Return the open session under `session_id`.

        Raises:
            SessionLost: no session has this id.
            RolloutFailure: the failure that closed the session.
            InputError: the session is graded and closed.
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

    def ended(self, session_id: str) -> SessionEnded | None:
        """Return the outcome of the session under `session_id`, if it is still kept."""
        return self._ended.get(session_id)

    def may_belong(self, session_id: str, row: object) -> bool:
        """Return true if a request with this task row can be the agent's own: the session has no episode, or
        its episode has this row. The model never sees the row, so its requests have another row or none."""
        known = self._open.get(session_id) or self._ended.get(session_id)
        return known is None or known.row_digest == _digest(row)

    async def open(self, session_id: str, row: Mapping[str, Any]) -> Prompt:
        """Start an episode of the task in `row`, in the order of requests. Repeating a seed returns the same
        session.

        Raises:
            InputError: the row is invalid, or the session has another task or is closed.
            RolloutFailure: the episode did not start; the session is closed with this failure.
        """
        if session_id in self._ended:
            raise InputError("this session has ended", hint="start an episode without session cookies")
        if (known := self._open.get(session_id)) is not None:
            return await self._reopened(session_id, known, row)
        environment = self._make()
        session = NemoSession(_digest(row), environment.load(row), environment, self._clock())
        self._open[session_id] = session
        async with session.lock:
            try:
                await self._acquire_slot(session)
                starting = environment.init(session.task)
                session.prompt = await _with_timeout(starting, self._limits.init_s, "The start")
            except BaseException as error:
                await self._end(session_id, session, _failure(error))
                raise
            session.last_used = self._clock()
            return session.prompt

    async def call(self, session_id: str, call: ToolCall) -> ToolResult:
        """Run one tool call; calls of one session run one after another.

        Raises:
            InputError, RolloutFailure: as `get`; or the call failed, which closes the session.
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
        """Grade the episode and close it. A repeated request gets the same answer.

        Args:
            output: the model's answers and calls, as items of the Responses API.

        Raises:
            RolloutFailure: there is no grade, for this reason.
        """
        if (session := self._open.get(session_id)) is None:
            return self._graded(session_id)
        async with session.lock:
            if session_id in self._ended:
                return self._graded(session_id)
            try:
                _pass_transcript(session, output)
                grade = await _with_timeout(session.environment.eval(), self._limits.eval_s, "The grader")
            except BaseException as error:
                await self._end(session_id, session, _failure(error))
                raise
            await self._end(session_id, session, grade)
            return grade

    async def expire(self) -> int:
        """Close the sessions that were idle for longer than the limit, and return their number."""
        oldest = self._clock() - self._limits.idle_s
        reason = f"the session was idle for more than {self._limits.idle_s:g} s"
        closed = 0
        for session_id, session in list(self._open.items()):
            # Check each session just before closing it, because closing earlier sessions may have taken long.
            if session.lock.locked() or session.last_used >= oldest or session_id not in self._open:
                continue
            async with session.lock:
                await self._end(session_id, session, SessionExpired(reason))
            closed += 1
        return closed

    async def keep_expiring(self) -> None:
        """Call `expire` in an endless loop, at intervals that are short compared with the limit."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s / 4, 30.0))
            await self.expire()

    async def end(self, session_id: str) -> None:
        """Close a session without a grade. Idempotent."""
        if (session := self._open.get(session_id)) is not None:
            await self._end(session_id, session, Cancelled("the session was closed before it was graded"))

    async def aclose(self) -> None:
        """Close every session."""
        for session_id in list(self._open):
            await self.end(session_id)

    async def _reopened(self, session_id: str, known: NemoSession, row: Mapping[str, Any]) -> Prompt:
        if known.row_digest != _digest(row):
            raise InputError("this session already has another task", hint="one session is one episode")
        async with known.lock:
            prompt = self.get(session_id).prompt
            known.last_used = self._clock()
        if prompt is None:  # unreachable while the lock covers the start; for the type checker
            raise SessionLost("the session did not start")
        return prompt

    def _graded(self, session_id: str) -> Grade:
        ended = self._ended.get(session_id)
        if ended is not None and isinstance(ended.outcome, Grade):
            return ended.outcome
        self.get(session_id)  # raises the failure
        raise SessionLost("no such session")

    async def _acquire_slot(self, session: NemoSession) -> None:
        if self._slots.locked() and self._waiting >= self._limits.waiting:
            hint = "lower the concurrency, or raise max_sessions"
            raise SessionsFull(f"{self._waiting} episodes wait already", hint=hint)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        session.has_slot = True

    async def _end(self, session_id: str, session: NemoSession, outcome: Grade | RolloutFailure) -> None:
        """Record the outcome, then close, so that a repeated request never finds a half-closed session."""
        if self._open.pop(session_id, None) is None:
            return
        self._ended[session_id] = SessionEnded(session.row_digest, session.task.id, outcome)
        while len(self._ended) > self._limits.remembered:
            self._ended.popitem(last=False)
        try:
            await session.environment.close()
        except ProrlError as error:
            # The outcome stands. The driver still owns an environment that failed to close, and closes it
            # with the server.
            logger.error("closing %s: %s", session.task.id, error)
        finally:
            if session.has_slot:
                self._slots.release()


def _digest(row: object) -> str:
    """Return a hash of a row, which may be megabytes long and is remembered after the episode."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _pass_transcript(session: NemoSession, output: Sequence[Mapping[str, Any]]) -> None:
    """Pass the transcript to the environment. Some agents send items that are not a conversation. This is
    only logged, because most environments ignore the transcript."""
    prompt = session.prompt.messages if session.prompt else ()
    try:
        session.environment.on_transcript((*prompt, *said_messages(output)))
    except InputError as error:
        logger.warning("the conversation cannot be read: %s", error)


async def _with_timeout[T](work: Coroutine[Any, Any, T], seconds: float, action: str) -> T:
    try:
        async with asyncio.timeout(seconds) as scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise StageTimeout(f"{action} took longer than {seconds:g} s") from error


def _failure(error: BaseException) -> RolloutFailure:
    """Return the failure to record for a session that `error` closed."""
    if isinstance(error, RolloutFailure):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the request was cancelled")
    return RolloutFailure(f"unexpected {type(error).__name__}: {error}")
