"""Measurement loop of a subject. The subject's own interpreter runs it, and the harness controls it.

Each subject has its own process, including ours and the floors, so that subjects do not slow each other down.
The process reads one JSON object per line from its standard input (`op`, and the operation's arguments), and
writes one line per answer to its standard output. It measures times itself with the host's clock. It exits at
the end of its input, or after an exception, which is written to its log.

This module imports only the standard library, because every peer's interpreter runs it.
"""

import asyncio
import inspect
import json
import os
import random
import resource
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

type Maybe[T] = T | Awaitable[T]
type Task = Callable[[], tuple[str, str]]

#: Largest number of sessions that are opened concurrently; a blocking subject opens one at a time.
OPEN_AT_ONCE = 8
#: State of every Python session before its first measured cell.
STATE = "numbers = list(range(1000))"


class Session(Protocol):
    """Shell or Python session of one agent."""

    def act(self, text: str) -> Maybe[str]:
        """Run a command or a cell, and return its output."""
        ...

    def close(self) -> Maybe[None]: ...


class Subject(Protocol):
    """Interface of subjects.

    Args:
        blocking: a call of a session blocks the thread, so concurrent sessions need one thread each.
        task: returns a command or cell, and its expected output.
    """

    blocking: bool
    task: Task

    def prepare(self) -> Maybe[str]:
        """Start the processes that all sessions share. Return the subject's name and version."""
        ...

    def open(self) -> Maybe[Session]: ...

    def pids(self) -> list[int]:
        """Return the processes of the open sessions, without shared processes."""
        ...

    def close(self) -> Maybe[None]: ...


def bash_task() -> tuple[str, str]:
    """Return a command with random output, and the output."""
    token = secrets.token_hex(8)
    return f"echo {token}", token


def cell_task() -> tuple[str, str]:
    """Return a cell that needs the session's state, and the output."""
    index, more = random.randrange(1000), random.randrange(1000)
    return f"numbers[{index}] + {more}", str(index + more)


async def settle[T](value: Maybe[T]) -> T:
    """Return the value, or await it if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


def run_cell_state(session: Session, task: Task) -> Maybe[str]:
    """Create the state of a new Python session; do nothing in a shell."""
    return session.act(STATE) if task is cell_task else ""


class Runner:
    """Runner of the harness's operations on one subject."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._sessions: list[Session] = []

    async def prepare(self) -> dict[str, Any]:
        return {"version": await settle(self._subject.prepare())}

    async def open(self, count: int) -> dict[str, Any]:
        """Open sessions, and wait for one answer of each open session. The sessions stay open."""
        gate = asyncio.Semaphore(1 if self._subject.blocking else OPEN_AT_ONCE)
        started = time.perf_counter()

        async def open_session() -> None:
            async with gate:
                session = await settle(self._subject.open())
                self._sessions.append(session)
                await settle(run_cell_state(session, self._subject.task))

        await asyncio.gather(*(open_session() for _ in range(count)))
        return {"seconds": time.perf_counter() - started, **await self.answer()}

    async def answer(self) -> dict[str, Any]:
        """Wait for one answer of each open session."""
        wrong = 0
        for session in self._sessions:
            text, expected = self._subject.task()
            wrong += (await settle(session.act(text))).strip() != expected
        return {"answered": len(self._sessions) - wrong}

    async def pids(self) -> dict[str, Any]:
        return {"pids": self._subject.pids()}

    async def shut(self) -> dict[str, Any]:
        """Close the open sessions."""
        started = time.perf_counter()
        sessions, self._sessions = self._sessions, []
        if self._subject.blocking:
            for session in sessions:
                await settle(session.close())
        else:
            await asyncio.gather(*(settle(session.close()) for session in sessions))
        return {"seconds": time.perf_counter() - started}

    async def act(self, count: int, budget_s: float) -> dict[str, Any]:
        """Run up to `count` actions one after the other in the first open session, for at most `budget_s`."""
        seconds: list[float] = []
        wrong = 0
        session = self._sessions[0]
        deadline = time.perf_counter() + budget_s
        while len(seconds) < count and (not seconds or time.perf_counter() < deadline):
            text, expected = self._subject.task()
            started = time.perf_counter()
            right = (await settle(session.act(text))).strip() == expected
            seconds.append(time.perf_counter() - started)
            wrong += not right
        return {"seconds": seconds, "wrong": wrong}

    async def ready(self, count: int, budget_s: float) -> dict[str, Any]:
        """Open up to `count` new sessions for at most `budget_s`; measure each up to its first answer."""
        seconds: list[float] = []
        wrong = 0
        deadline = time.perf_counter() + budget_s
        while len(seconds) < count and (not seconds or time.perf_counter() < deadline):
            started = time.perf_counter()
            session = await settle(self._subject.open())
            await settle(run_cell_state(session, self._subject.task))
            text, expected = self._subject.task()
            right = (await settle(session.act(text))).strip() == expected
            seconds.append(time.perf_counter() - started)
            wrong += not right
            await settle(session.close())
        return {"seconds": seconds, "wrong": wrong}

    async def rate(self, budget_s: float) -> dict[str, Any]:
        """Run actions in all open sessions concurrently for `budget_s`, one at a time in each session."""
        started = time.perf_counter()
        deadline = started + budget_s
        task = self._subject.task
        if self._subject.blocking:
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(len(self._sessions)) as threads:
                waits = [
                    loop.run_in_executor(threads, asyncio.run, _until(s, task, deadline))
                    for s in self._sessions
                ]
                counts = await asyncio.gather(*waits)
        else:
            counts = await asyncio.gather(*(_until(s, task, deadline) for s in self._sessions))
        elapsed = time.perf_counter() - started
        answers = sum(done for done, _ in counts)
        return {"rate": answers / elapsed, "answers": answers, "wrong": sum(wrong for _, wrong in counts)}

    async def close(self) -> None:
        await self.shut()
        await settle(self._subject.close())


async def _until(session: Session, task: Task, deadline: float) -> tuple[int, int]:
    done = wrong = 0
    while not done or time.perf_counter() < deadline:
        text, expected = task()
        wrong += (await settle(session.act(text))).strip() != expected
        done += 1
    return done, wrong


def serve(subject: Subject) -> None:
    """Measure `subject` as the harness requests, until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of a peer goes to the log, because standard output is for answers
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    asyncio.run(_serve(Runner(subject), answers.write))


async def _serve(runner: Runner, answer: Callable[[str], object]) -> None:
    operations = {
        name: getattr(runner, name)
        for name in ("prepare", "open", "answer", "pids", "shut", "act", "ready", "rate")
    }
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            operation = operations[request.pop("op")]
            answer(json.dumps(await operation(**request)) + "\n")
    finally:
        await runner.close()


def free_port() -> int:
    """Return a free TCP port on the loopback interface, for peers that cannot take a socket."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def attempts(seconds: float, pause_s: float = 0.05) -> Iterator[float]:
    """Yield the remaining seconds at intervals, for repeated checks of a server.

    Raises:
        TimeoutError: the time is over.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield deadline - time.monotonic()
        time.sleep(pause_s)
    raise TimeoutError(f"no answer within {seconds:.0f} s")
