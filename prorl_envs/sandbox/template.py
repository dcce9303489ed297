"""Template processes, seen from the host: started once, asked for a fork per tool server.

Why: an interpreter per sandbox costs 100 ms and 15 MB; a fork of a process that has imported everything
costs 2 ms and 1 MB, and needs nothing from the sandbox's image.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prorl_envs
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.processes import Process, receive
from prorl_envs.sandbox.zygote import MESSAGE_LIMIT, REPORT_LIMIT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """What a template has ready before it forks.

    Args:
        entries: the only `package.module:function`s its forks may run; their modules are imported.
        preload: further modules to import, or `module:function`s to call once, in order.
        start_timeout_s: seconds it may take to get ready.
    """

    entries: tuple[str, ...]
    preload: tuple[str, ...] = ()
    start_timeout_s: float = 60.0


#: The templates of a node, by the name `Sandbox.spawn` uses. Names only: this room imports no tools.
TEMPLATES: Mapping[str, TemplateSpec] = {
    "base": TemplateSpec(entries=("prorl_envs.tools.server:serve",)),
    "ipython": TemplateSpec(
        entries=("prorl_envs.tools.server:serve",), preload=("IPython.core.interactiveshell",)
    ),
}

#: Appends the package's own folder: `-I` leaves out the working directory, and the template must run the
#: same code as its host even where that was imported from a path set at run time.
_BOOT = """\
import sys
sys.path.extend(path for path in sys.argv[1:] if path not in sys.path)
from prorl_envs.sandbox.zygote import main
main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A tool server to be: see `join.JoinRequest` and `Sandbox.spawn`."""

    entry: str
    workdir: str
    env: Mapping[str, str]
    isolated: bool = True
    timeout_s: float = 30.0


class ToolServer:
    """A forked process, held until it has ended. Logs the traceback of one that fails."""

    def __init__(self, sandbox_id: str, pid: int, pidfd: int, status: socket.socket) -> None:
        self._sandbox_id = sandbox_id
        self._status = status
        self.process = Process(pid, pidfd, on_exit=self._ended)

    def _ended(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            report = self._status.recv(2 * REPORT_LIMIT)
            if report:
                message = json.loads(report)
                logger.warning("tool server of sandbox %s failed: %s", self._sandbox_id, message["error"])
        self._status.close()

    def close(self) -> None:
        self.process.close()
        self._status.close()


class Template:
    """One template process, started at first use and again whenever it is found dead.

    Args:
        name: its name in messages.
        spec: what it prepares.
    """

    def __init__(self, name: str, spec: TemplateSpec) -> None:
        self.name = name
        self.spec = spec
        self._starting = asyncio.Lock()
        self._running: _Running | None = None

    async def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            SandboxError: with the template's own words.
        """
        await self._ensure()

    async def fork(
        self, sandbox_id: str, pidfd: int, request: ForkRequest
    ) -> tuple[ToolServer, socket.socket]:
        """Fork a process into the sandbox whose first process is `pidfd`.

        Returns:
            The process, and the host's end of its stream socket (non-blocking). The caller owns both.

        Raises:
            SandboxError: the entry is unknown, the template does not start, or the process cannot join.
        """
        if request.entry not in self.spec.entries:
            raise SandboxError(
                f"template {self.name!r} has no entry {request.entry!r}",
                hint=f"it has: {', '.join(self.spec.entries)}",
            )
        running = await self._ensure()
        return await running.fork(sandbox_id, pidfd, request)

    async def aclose(self) -> None:
        """End the process. Its forks end with it. Idempotent."""
        async with self._starting:
            running, self._running = self._running, None
            if running is not None:
                await running.aclose()

    async def _ensure(self) -> "_Running":
        async with self._starting:
            if self._running is not None and not self._running.process.alive:
                logger.warning("template %s died and is started again", self.name)
                await self._running.aclose()
                self._running = None
            if self._running is None:
                running = _Running(self.name)
                try:
                    await running.start(self.spec)
                except BaseException:
                    await asyncio.shield(running.aclose())
                    raise
                self._running = running
            return self._running


class _Running:
    """A template's process and its control socket."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._sending = asyncio.Lock()
        with inside:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, *_code_paths()],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_template_environment(),
                cwd="/",
                # A Ctrl-C in the terminal is for the service, which then ends its templates in order.
                start_new_session=True,
            )
        self.process = Process.open(self._child.pid)
        assert self._child.stderr is not None
        self._stderr = self._child.stderr.fileno()
        os.set_blocking(self._stderr, False)
        asyncio.get_running_loop().add_reader(self._stderr, self._log_stderr)

    async def start(self, spec: TemplateSpec) -> None:
        setup = {"entries": spec.entries, "preload": spec.preload}
        self._control.send(json.dumps(setup).encode())
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                answer, _ = await receive(self._control, MESSAGE_LIMIT)
        except TimeoutError:
            raise SandboxError(f"template {self._name!r} was not ready in {spec.start_timeout_s} s") from None
        message = json.loads(answer) if answer else {"error": "the process ended"}
        if "error" in message:
            raise SandboxError(f"template {self._name!r} did not start: {message['error'].strip()}")

    async def fork(
        self, sandbox_id: str, pidfd: int, request: ForkRequest
    ) -> tuple[ToolServer, socket.socket]:
        with contextlib.ExitStack() as undo:
            tool, tool_inside = _pair(socket.SOCK_STREAM, undo)
            status, status_inside = _pair(socket.SOCK_SEQPACKET, undo)
            try:
                async with asyncio.timeout(request.timeout_s):
                    await self._send(request, [pidfd, tool_inside.fileno(), status_inside.fileno()])
                    tool_inside.close()
                    status_inside.close()
                    server = await _birth(sandbox_id, status, undo)
            except TimeoutError:
                raise SandboxError(f"no tool server within {request.timeout_s} s") from None
            undo.pop_all()
            return server, tool

    async def aclose(self) -> None:
        self._control.close()
        self.process.kill()
        await self.process.wait()
        self.process.close()
        self._child.wait()  # it has ended: this only reaps
        self._log_stderr()
        asyncio.get_running_loop().remove_reader(self._stderr)
        assert self._child.stderr is not None
        self._child.stderr.close()

    async def _send(self, request: ForkRequest, descriptors: list[int]) -> None:
        message = json.dumps(
            {
                "entry": request.entry,
                "workdir": request.workdir,
                "env": dict(request.env),
                "isolated": request.isolated,
            }
        ).encode()
        if len(message) > MESSAGE_LIMIT:
            raise SandboxError("the environment is too large", hint=f"keep it under {MESSAGE_LIMIT} bytes")
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._control, [message], descriptors)
                except BlockingIOError:
                    await _writable(self._control.fileno())
                except (BrokenPipeError, ConnectionResetError):
                    raise SandboxError(f"template {self._name!r} has died") from None
                else:
                    return

    def _log_stderr(self) -> None:
        try:
            text = os.read(self._stderr, 4096)
        except BlockingIOError:
            return
        if text:
            logger.warning("template %s: %s", self._name, text.decode(errors="replace").rstrip())
        else:
            asyncio.get_running_loop().remove_reader(self._stderr)


async def _birth(sandbox_id: str, status: socket.socket, undo: contextlib.ExitStack) -> ToolServer:
    """Wait for the template's message (the process, with its pidfd) and the child's own (it has joined).

    They come in either order.
    """
    server: ToolServer | None = None
    joined = False
    while server is None or not joined:
        answer, fds = await receive(status, 2 * REPORT_LIMIT, descriptors=1)
        message: dict[str, Any] = json.loads(answer) if answer else {"summary": "the process ended"}
        if fds:
            server = ToolServer(sandbox_id, message["pid"], fds[0], status)
            undo.callback(server.close)
            undo.callback(server.process.kill)
        elif message.get("ready"):
            joined = True
        else:
            raise SandboxError(
                f"a process could not join the sandbox: {message['summary']}",
                hint="the sandbox may have ended; `prorl-envs doctor` checks this machine",
            )
    return server


def _pair(kind: socket.SocketKind, undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    undo.enter_context(ours)
    undo.enter_context(theirs)
    ours.setblocking(False)
    return ours, theirs


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(fd)


def _code_paths() -> Iterator[str]:
    for folder in prorl_envs.__path__:
        yield str(Path(folder).resolve().parent)


def _template_environment() -> dict[str, str]:
    """Nothing of the service's own environment but where its interpreter's libraries lie."""
    kept = {"LANG": "C.UTF-8"}
    if library_path := os.environ.get("LD_LIBRARY_PATH"):
        kept["LD_LIBRARY_PATH"] = library_path
    return kept
