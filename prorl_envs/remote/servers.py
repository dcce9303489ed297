"""Resources servers for the episodes of a collection: an external server, or a server that this process runs.

The latter is a separate process with the Python of the environment in which NeMo Gym is installed. It listens
on loopback only, on a socket created here, and stops with the service. If it exits by itself, its episodes
fail, since their state is lost, and the next episode starts it again.
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
from prorl_envs.errors import EnvironmentFault, InputError, ProrlError, expand_user, printable
from prorl_envs.remote.http import RemoteConnection

log = logging.getLogger(__name__)

#: Program of the server. It is run as a file, since its Python may not have this package.
PROGRAM = Path(__file__).parent.parent / "nemo" / "alone.py"
#: Environment variables that are passed to the server. Variables with secrets are not.
_ENVIRONMENT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
_OWN_VARIABLES = ("PRORL_RUN_DIR", "PRORL_CACHE_DIR", "PRORL_BWRAP", "PRORL_DRIVER")
#: Exit status of the program if the configuration is wrong. Its last output line is then an error as JSON.
_REFUSED_STATUS = 2
#: Seconds for the server to stop before it is killed.
STOP_S = 8.0
#: Number of last output lines that are kept for error messages.
_LINES = 20
_LINE_BYTES = 16 * 1024


@dataclass(slots=True, kw_only=True)
class RunningServer:
    """External resources server, with the limits of requests.

    Args:
        url: base URL of the server.
        finish_tool: tool whose call finishes an episode; "" if an answer without a call finishes it.
        fail_on_500: True if an internal error of a tool fails the episode. Otherwise the model receives it.
        connect_s: timeout in seconds for connecting.
        seed_s, call_s, verify_s: timeouts in seconds of each kind of request.
        tool_bytes: maximum number of bytes of a tool's answer that the model receives.
    """

    url: str = ""
    finish_tool: str = ""
    fail_on_500: bool = False
    connect_s: float = 10.0
    seed_s: float = 600.0
    call_s: float = 60.0
    verify_s: float = 900.0
    tool_bytes: int = 64 * 1024
    #: Whether the server takes typed seeds; None if it was not asked yet.
    typed: bool | None = None
    _tls: Any = None

    async def connection(self, clock: Clock) -> RemoteConnection:
        """Return a connection for one episode. If this process runs the server, start it if necessary.

        Raises:
            RolloutFailure: the server does not start.
        """
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return RemoteConnection(self.url, connect_s=self.connect_s, tls=self._tls, clock=clock)

    async def start(self) -> None:
        """Do nothing, since an external server may start later."""

    async def aclose(self) -> None:
        """Do nothing, since there is no process to stop."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()


@dataclass(slots=True, kw_only=True)
class OwnServer(RunningServer):
    """Resources server of an installed NeMo Gym, which this process runs as a separate process.

    Args:
        name: name of the collection, for messages.
        config: YAML file of the server: a path here, or a path relative to NeMo Gym's folder.
        instance: name of the resources server in the file; None if the file defines only one.
        overrides: values that override those of the server's block in the file.
        python: interpreter of an environment that has NeMo Gym; None takes the current interpreter.
        roots: further folders that contain `resources_servers/`.
        pass_env: further environment variables to pass to the server.
        start_s: timeout in seconds for the first answer after the start.
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
    _output_task: "asyncio.Task[None] | None" = None
    _start_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=_LINES))

    @property
    def pid(self) -> int | None:
        """Process id while the server runs, else None."""
        process = self._process
        return process.pid if process is not None and not _has_exited(process) else None

    async def connection(self, clock: Clock) -> RemoteConnection:
        if self.pid is None:
            try:
                await self.start()
            except InputError as error:
                raise EnvironmentFault(error.message, hint=error.hint) from error
        return await RunningServer.connection(self, clock)

    async def start(self) -> None:
        """Start the server, unless it is running.

        Raises:
            InputError: the server cannot be started with this configuration.
        """
        async with self._start_lock:
            if self.pid is not None:
                return
            await self.aclose()
            listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
            try:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                await self._spawn(listener.fileno())
            finally:
                listener.close()  # so that connections are refused, and do not wait, if the process exits
            try:
                await self._wait_for_answer()
            except BaseException:
                await self.aclose()
                raise

    async def aclose(self) -> None:
        """Stop the server and its process group. Idempotent."""
        process, self._process = self._process, None
        reading, self._output_task = self._output_task, None
        if process is not None:
            await asyncio.shield(asyncio.ensure_future(_stop(process, reading)))

    async def _spawn(self, descriptor: int) -> None:
        python = str(expand_user(self.python or sys.executable))
        names = (*_ENVIRONMENT, *_OWN_VARIABLES, *self.pass_env)
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
        self._output_task = asyncio.create_task(self._read(self._process))
        await self._send_configuration(self._process)

    async def _send_configuration(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        with suppress(ConnectionError):  # the process has exited; its output contains the reason
            process.stdin.write(json.dumps(self._configuration()).encode())
            await process.stdin.drain()
        process.stdin.close()

    def _configuration(self) -> dict[str, Any]:
        """Return the configuration to send. If `config` is not a file here, NeMo Gym's folder has it."""
        config = expand_user(self.config)
        return {
            "config": str(config.resolve()) if config.is_file() else self.config,
            "instance": self.instance,
            "overrides": dict(self.overrides),
            "roots": [str(expand_user(root).resolve()) for root in self.roots],
            "parent": os.getpid(),
        }

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Copy the server's output to the log, and remember its last lines."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(_LINE_BYTES):
            for line in chunk.decode("utf-8", "replace").rstrip("\n").split("\n"):
                self._lines.append(line)
                log.debug("%s: %s", self.name, printable(line))

    async def _wait_for_answer(self) -> None:
        """Wait for the first answer. One request is enough: the socket listens already, so it waits there."""
        process = self._process
        assert process is not None
        answer = asyncio.ensure_future(self._ask())
        exited = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({answer, exited}, return_when=asyncio.FIRST_COMPLETED, timeout=self.start_s)
            if answer.done() and answer.exception() is not None:  # most likely because the process exited
                await asyncio.wait({exited}, timeout=STOP_S)
            if exited.done():
                raise await self._exit_error(process)
            if not answer.done():
                raise InputError(
                    f"environments.{self.name}: its server does not answer after {self.start_s:g} s",
                    hint="raise nemo.start_s; `log: {level: debug}` shows the server's output",
                )
            answer.result()
        finally:
            for task in (answer, exited):
                task.cancel()
            await asyncio.gather(answer, exited, return_exceptions=True)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=None) as http:  # the caller has a timeout
            try:
                await http.get(self.url + "/")
            except httpx.TransportError as error:
                raise InputError(
                    f"environments.{self.name}: its server closed the connection: {error!r}"
                ) from error

    async def _exit_error(self, process: asyncio.subprocess.Process) -> ProrlError:
        if self._output_task is not None:
            await asyncio.wait({self._output_task}, timeout=STOP_S)
        last = self._lines[-1] if self._lines else ""
        if process.returncode == _REFUSED_STATUS and last.startswith("{"):
            with suppress(ValueError, KeyError, TypeError):
                report = json.loads(last)
                return InputError(f"environments.{self.name}: {report['error']}", hint=report["hint"])
        output = "\n".join(self._lines)[-2000:]
        return InputError(
            f"environments.{self.name}: its server exited with status {process.returncode}:\n{output}",
            hint="can `gym env start` start it?",
        )


def _has_exited(process: asyncio.subprocess.Process) -> bool:
    """Return True if the process has exited. Queries the kernel, since a busy event loop notices it late."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # the event loop has just reaped it
        return True


async def _stop(process: asyncio.subprocess.Process, reading: "asyncio.Task[None] | None") -> None:
    """Stop a process and its process group, with SIGTERM and then SIGKILL."""
    _signal_group(process, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await process.wait()
    _signal_group(process, signal.SIGKILL)
    await process.wait()
    if reading is not None:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    # A process outside of the group may still hold the other end of the pipe, so this end is closed here.
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
