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
from prorl_envs.env.replay import replay
from prorl_envs.env.responses import said_messages
from prorl_envs.errors import (
    Cancelled,
    EnvironmentFault,
    InputError,
    ProrlError,
    RolloutFailure,
    StageTimeout,
)
from prorl_envs.strict_json import STRICT_JSON
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult

logger = logging.getLogger(__name__)

#: Maximum bytes of one tool call's arguments.
MAX_ARGUMENT_BYTES = 8 * 2**20

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
        idle_s: seconds without a request after which a session is closed. While seeds wait, a sixth of them.
        queue_s: seconds that a seed waits at most.
        init_s, eval_s: timeouts of the start and of the grader in seconds, without the wait in the queue.
    """

    open: int = 64
    waiting: int = 4096
    remembered: int = 16_384
    idle_s: float = 1800.0
    queue_s: float = 3600.0
    init_s: float = 600.0
    eval_s: float = 900.0


@dataclass(slots=True, eq=False)
class NemoSession:
    """One open episode. `turns` counts model answers, for callers that step through them. `step` is the work
    that runs now or ran last."""

    row_digest: str
    task: Task
    environment: AnyEnvironment
    last_used: float
    prompt: Prompt | None = None
    turns: int = 0
    has_slot: bool = False
    step: asyncio.Task[Any] | None = None
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

    def may_close(self, session_id: str, closed: object) -> bool:
        """Return true if a request to close the session `closed` can be the agent's own. The model, whose
        requests belong to an open session, does not know the session's id."""
        return session_id not in self._open or session_id == closed

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
        environment, task = self._load(row)
        session = NemoSession(_digest(row), task, environment, self._clock())
        self._open[session_id] = session
        async with session.lock:
            session.prompt = await self._step(session_id, session, self._start(session))
            return session.prompt

    async def call(self, session_id: str, call: ToolCall) -> ToolResult:
        """Run one tool call; calls of one session run one after another.

        Raises:
            InputError, RolloutFailure: as `get`; or the call failed, which closes the session.
        """
        session = self.get(session_id)
        async with session.lock:
            self.get(session_id)
            return await self._step(session_id, session, session.environment.call(call))

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
            grade = await self._step(session_id, session, self._grade(session, output))
            await self._end(session_id, session, grade)
            return grade

    async def regrade(self, row: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> Grade:
        """Grade recorded answers again, by a replay of their tool calls; `output` as for `grade`.

        Raises:
            InputError: the row or the output is invalid.
            RolloutFailure: there is no grade, for this reason.
        """
        environment, task = self._load(row)
        messages = said_messages(output)
        await self._acquire_slot()
        try:
            limit = self._limits.init_s + self._limits.eval_s
            return (await _with_timeout(replay(environment, task, messages), limit, "The replay")).grade
        finally:
            self._slots.release()

    async def expire(self) -> int:
        """Close the sessions that were idle for longer than the limit, and return their number."""
        closed = 0
        for session_id, session in sorted(self._open.items(), key=lambda item: item[1].last_used):
            # Decide for each session just before its close, because earlier closes may have taken long.
            waited_for = closed < self._waiting
            limit = self._limits.idle_s / 6 if waited_for else self._limits.idle_s
            idle = self._clock() - session.last_used
            if session.lock.locked() or idle <= limit or session_id not in self._open:
                continue
            others = " while others waited" if waited_for else ""
            reason = f"the session was idle for more than {limit:g} s{others}"
            async with session.lock:
                await self._end(session_id, session, SessionExpired(reason))
            closed += 1
        return closed

    async def keep_expiring(self) -> None:
        """Call `expire` in an endless loop, at intervals that are short compared with the limit."""
        while True:
            await asyncio.sleep(min(self._limits.idle_s / 12, 30.0))
            await self.expire()

    async def close(self, session_id: str) -> None:
        """Close a session without a grade, and stop its running step. If there is none, none can be opened
        with this id any more. Idempotent."""
        reason = Cancelled("the session was closed before it was graded")
        if (session := self._open.get(session_id)) is not None:
            await self._end(session_id, session, reason)
        elif session_id not in self._ended:
            self._remember(session_id, SessionEnded("", "", reason))

    async def aclose(self) -> None:
        """Close every session."""
        for session_id in list(self._open):
            await self.close(session_id)

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

    async def _step[T](self, session_id: str, session: NemoSession, work: Coroutine[Any, Any, T]) -> T:
        """Run one step of an episode, under the session's lock. A failure closes the session.

        Raises:
            RolloutFailure: the step failed, or the session was closed meanwhile.
        """
        session.step = step = asyncio.create_task(work)
        try:
            return await step
        except BaseException as error:
            if session_id in self._ended and not self._cancelled():
                self.get(session_id)  # raises the reason of the close
            await self._end(session_id, session, _failure(error))
            raise
        finally:
            session.last_used = self._clock()

    @staticmethod
    def _cancelled() -> bool:
        """Return true if the request itself was cancelled."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    def _load(self, row: Mapping[str, Any]) -> tuple[AnyEnvironment, Task]:
        environment = self._make()
        try:
            return environment, environment.load(row)
        except InputError as error:
            message = f"not a task of the environment {environment.name!r}: {error.message}"
            raise InputError(message, hint=error.hint) from error

    async def _start(self, session: NemoSession) -> Prompt:
        await self._acquire_slot()
        session.has_slot = True
        starting = session.environment.init(session.task)
        return await _with_timeout(starting, self._limits.init_s, "The start")

    async def _grade(self, session: NemoSession, output: Sequence[Mapping[str, Any]]) -> Grade:
        _pass_transcript(session, output)
        return await _with_timeout(session.environment.eval(), self._limits.eval_s, "The grader")

    async def _acquire_slot(self) -> None:
        hint = "lower the concurrency, or raise max_sessions"
        if self._slots.locked():
            if self._waiting >= self._limits.waiting:
                raise SessionsFull(f"{self._waiting} episodes wait already", hint=hint)
            if not self._waiting:
                logger.warning("all %d sandboxes are in use: episodes wait (%s)", self._limits.open, hint)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.queue_s):
                await self._slots.acquire()
        except TimeoutError:
            raise SessionsFull(f"no sandbox was free for {self._limits.queue_s:g} s", hint=hint) from None
        finally:
            self._waiting -= 1

    async def _end(self, session_id: str, session: NemoSession, outcome: Grade | RolloutFailure) -> None:
        """Record the outcome, then close, so that a repeated request never finds a half-closed session."""
        if self._open.pop(session_id, None) is None:
            return
        self._remember(session_id, SessionEnded(session.row_digest, session.task.id, outcome))
        if session.step is not None:
            session.step.cancel()
            await asyncio.wait([session.step])
        try:
            await session.environment.close()
        except ProrlError as error:
            # The outcome stands. The driver still owns an environment that failed to close, and closes it
            # with the server.
            logger.error("closing %s: %s", session.task.id, error)
        finally:
            if session.has_slot:
                self._slots.release()

    def _remember(self, session_id: str, ended: SessionEnded) -> None:
        self._ended[session_id] = ended
        while len(self._ended) > self._limits.remembered:
            self._ended.popitem(last=False)


def parse_arguments(text: str | bytes) -> JsonObject | str:
    """Parse the arguments of a tool call; return an error message for the model if they are invalid."""
    if len(text) > MAX_ARGUMENT_BYTES:
        return f"The arguments are longer than {MAX_ARGUMENT_BYTES} bytes."
    try:
        arguments = STRICT_JSON.decode((text if isinstance(text, str) else text.decode()) or "{}")
    except (ValueError, RecursionError) as error:
        return f"The arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return f"The arguments must be a JSON object, not a {type(arguments).__name__}."
    return arguments


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
