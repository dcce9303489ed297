"""The scripted model server: vLLM's completions token protocol over real HTTP, on loopback.

    book = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})
    async with ScriptedServer(book, mix=Mix.parse("solve=2,wrong=1")) as server:
        print(server.url)

Besides the protocol it serves `/scripted/stats` (counts, violations of the token ledger among them) and
`/scripted/log` (the last exchanges, in full).
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.testing.audit import Counts, Exchange
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.scripted_app import ScriptedOptions, ScriptedService, scripted_app
from prorl_envs.testing.tokenizer import builtin_renderer


class ScriptedServer:
    """The scripted model server, running in this program on a free loopback port.

    An async context manager: entered, it listens at `url`; left, it is gone.

    Args:
        book: the tasks it knows, or None for a server that knows none.
        port: 0 takes a free one.
        renderer: tokenizer and template of the model it plays; by default the built-in one.
        clock: of the latency; by default the machine's.
        options: the fields of `ScriptedOptions`.
    """

    def __init__(
        self,
        book: ScriptBook | None = None,
        *,
        port: int = 0,
        renderer: TemplateRenderer | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self._service = ScriptedService(
            renderer or builtin_renderer(),
            book or ScriptBook({}),
            ScriptedOptions(**options),
            clock or SystemClock(),
        )
        self._port = port
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    @property
    def counts(self) -> Counts:
        """What it has counted up to now."""
        return self._service.counts

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """The last requests and answers, oldest first."""
        return tuple(self._service.audit.exchanges)

    async def until(self, holds: Callable[[Counts], bool]) -> None:
        """Return once the counts are so: `await server.until(lambda counts: counts.running == 1)`."""
        await self._service.until(holds)

    async def __aenter__(self) -> Self:
        # asyncio turns Nagle's algorithm off only where the protocol is named; else each answer takes 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            try:
                listener.bind(("127.0.0.1", self._port))
            except OSError as error:
                raise InputError(f"port {self._port} cannot be used: {error.strerror}") from error
            await stack.enter_async_context(_serving(scripted_app(self._service), listener))
            self._stack = stack.pop_all()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()


class _Server(uvicorn.Server):
    """uvicorn inside somebody else's program: signals are that program's business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@contextlib.asynccontextmanager
async def _serving(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]), name="scripted model server")
    try:
        await server.listening.wait()
        yield
    finally:
        server.should_exit = True
        await task
