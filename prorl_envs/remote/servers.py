"""Resources servers for the episodes of a collection: an external server, or one that this process starts.

A started server is a separate process that runs the Python of the environment in which NeMo Gym is installed.
It listens on loopback only, on a socket created here, and stops with the service. If the server exits by
itself, its episodes fail (their state is lost), and the next episode starts it again.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from prorl_envs.clock import Clock
from prorl_envs.errors import EnvironmentFault, InputError, ProrlError, printable
from prorl_envs.remote.http import RemoteConnection

log = logging.getLogger(__name__)

#: Program of a started server. A file, not a module: its Python may not have this package.
PROGRAM = Path(__file__).parent.parent / "nemo" / "alone.py"
#: Environment variables passed to a started server; secrets are not included.
_ENVIRONMENT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
_OURS = ("PRORL_RUN_DIR", "PRORL_CACHE_DIR", "PRORL_BWRAP", "PRORL_DRIVER")
_REFUSED = 2
#: Seconds a server may take to stop.
END_S = 8.0
#: Lines of its output kept for error messages.
_LINES = 20
_LINE_BYTES = 16 * 1024


@dataclass(slots=True, kw_only=True)
class RunningServer:
    """An external resources server. The bounds are those of `environment.Server`.

    Args:
        url: its base URL.
        connect_s: seconds to connect.
    """

    url: str = ""
    finish_tool: str = ""
    fail_on_500: bool = False
    connect_s: float = 10.0
    seed_s: float = 600.0
    call_s: float = 60.0
    verify_s: float = 900.0
    tool_bytes: int = 64 * 1024
    _tls: Any = None

    async def connection(self, clock: Clock) -> RemoteConnection:
        """Return a connection for one episode."""
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return RemoteConnection(self.url, connect_s=self.connect_s, tls=self._tls, clock=clock)

    async def start(self) -> None:
        """Do nothing: an external server may start later."""

    async def aclose(self) -> None:
        """Do nothing: there is no process to stop."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


@dataclass(slots=True, kw_only=True)
class OwnServer(RunningServer):
    """A resources server of an installed NeMo Gym, in a separate process.

    Args:
        name: the collection's, for messages.
        config: its YAML file: a path, or one below NeMo Gym's own folder.
        instance: resources server of the file; None if the file defines only one.
        overrides: values that override those of the server's block in the file.
        python: the interpreter of an environment that has NeMo Gym; None takes the current interpreter.
        roots: further folders that contain `resources_servers/`.
        pass_env: further environment variables to pass to the server.
        start_s: seconds until the server must answer.
    """

    name: str
    config: str
    instance: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    python: Path | None = None
    roots: tuple[Path, ...] = ()
    pass_env: tuple[str, ...] = ()
    start_s: float = 120.0
    _process: asyncio.subprocess.Process | None = None
    _reading: "asyncio.Task[None] | None" = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=_LINES))

    @property
    def pid(self) -> int | None:
        """Process id while the server runs, else None."""
        process = self._process
        return process.pid if process is not None and not _has_ended(process) else None

    async def connection(self, clock: Clock) -> RemoteConnection:
        if self.pid is None:
            try:
                await self.start()
            except InputError as error:
                raise EnvironmentFault(error.message, hint=error.hint) from error
        return await RunningServer.connection(self, clock)

    async def start(self) -> None:
        """Start the server, unless it runs.

        Raises:
            InputError: it cannot be started with this configuration.
        """
        async with self._starting:
            if self.pid is not None:
                return
            await self.aclose()
            listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
            try:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                await self._spawn(listener.fileno())
            finally:
                listener.close()  # only the process holds it: if that exits, clients do not wait for nothing
            try:
                await self._until_it_answers()
            except BaseException:
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Stop the server and its process group. Idempotent."""
        process, self._process = self._process, None
        reading, self._reading = self._reading, None
        if process is not None:
            await asyncio.shield(asyncio.ensure_future(_end(process, reading)))

    async def _spawn(self, descriptor: int) -> None:
        python = str((self.python or Path(sys.executable)).expanduser())
        names = (*_ENVIRONMENT, *_OURS, *self.pass_env)
        self._lines.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(python, "-P", "-u", str(PROGRAM), str(descriptor)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={name: os.environ[name] for name in names if name in os.environ},
                pass_fds=(descriptor,),
                start_new_session=True,
                limit=_LINE_BYTES,
            )
        except OSError as error:
            raise InputError(
                f"environments.{self.name}: {python} cannot be started: {error.strerror}",
                hint="nemo.python: the Python of an environment that has NeMo Gym",
            ) from error
        self._reading = asyncio.create_task(self._read(self._process))
        await self._request(self._process)

    async def _request(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):  # already exited; its output has the reason
            process.stdin.write(json.dumps(self._order()).encode())
            await process.stdin.drain()
        process.stdin.close()

    def _order(self) -> dict[str, Any]:
        """Return the configuration to send; a path that is no file here is one of NeMo Gym's own files."""
        config = Path(self.config).expanduser()
        return {
            "config": str(config.resolve()) if config.is_file() else self.config,
            "instance": self.instance,
            "overrides": dict(self.overrides),
            "roots": [str(root.expanduser().resolve()) for root in self.roots],
            "parent": os.getpid(),
        }

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Copy the server's output to the log, and keep its last lines."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(_LINE_BYTES):
            for line in chunk.decode("utf-8", "replace").rstrip("\n").split("\n"):
                self._lines.append(line)
                log.debug("%s: %s", self.name, printable(line))

    async def _until_it_answers(self) -> None:
        """Wait for the first answer. The socket already listens, so one request waits on it."""
        process = self._process
        assert process is not None
        asking = asyncio.ensure_future(self._ask())
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED, timeout=self.start_s)
            if asking.done() and asking.exception() is not None:  # most likely because the process exited
                await asyncio.wait({ending}, timeout=END_S)
            if ending.done():
                raise await self._why(process)
            if not asking.done():
                raise InputError(
                    f"environments.{self.name}: its server does not answer after {self.start_s:g} s",
                    hint="nemo.start_s; `log: {level: debug}` shows what it says",
                )
            asking.result()
        finally:
            for task in (asking, ending):
                task.cancel()
            await asyncio.gather(asking, ending, return_exceptions=True)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:  # the caller bounds it
            try:
                await http.get(self.url + "/")
            except httpx.TransportError as error:
                raise InputError(f"environments.{self.name}: its server broke off: {error!r}") from error

    async def _why(self, process: asyncio.subprocess.Process) -> ProrlError:
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=END_S)
        last = self._lines[-1] if self._lines else ""
        if process.returncode == _REFUSED and last.startswith("{"):
            with suppress(ValueError, KeyError, TypeError):
                said = json.loads(last)
                return InputError(f"environments.{self.name}: {said['error']}", hint=said["hint"])
        told = "\n".join(self._lines)[-2000:]
        return InputError(
            f"environments.{self.name}: its server ended with status {process.returncode}:\n{told}",
            hint="does `gym env start` start it?",
        )


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether the process exited. Asks the kernel: a busy event loop notices an exit late."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the event loop has just reaped it
        return True


async def _end(process: asyncio.subprocess.Process, reading: "asyncio.Task[None] | None") -> None:
    """Stop a process and its process group: SIGTERM first, then SIGKILL."""
    _signal_group(process, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
    _signal_group(process, signal.SIGKILL)
    await process.wait()
    if reading is not None:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    # A process that left the group may keep the pipe's other end open; close this end.
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
