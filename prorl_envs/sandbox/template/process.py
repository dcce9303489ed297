"""Host side of one template process, from its start to its exit, and of the forks requested from it.

The other side is `zygote.py`, whose docstring describes the protocol.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import prorl_envs
from prorl_envs.errors import SandboxError, printable
from prorl_envs.sandbox.filesystem.disk_usage import DiskUse
from prorl_envs.sandbox.linux.descriptors import pid_of
from prorl_envs.sandbox.linux.kernel_settings import Setting
from prorl_envs.sandbox.linux.pidfd import Process, not_in_forks, receive, writable
from prorl_envs.sandbox.template.zygote import MESSAGE_LIMIT, REPORT_LIMIT

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 30.0
#: Seconds for the exit of a template, which kills its descendants first: long, for busy machines.
_END_TIMEOUT_S = 30.0
_OUTPUT_LIMIT = 4096
#: Module of checkpoints. Only templates of drivers that take some need to preload it.
CHECKPOINT = "prorl_envs.sandbox.template.checkpoint"

#: Imports the package from the host process's folder, even if another copy is installed, so that a template
#: runs the same code as its host. All other imports search that folder last. The control socket gets a number
#: before libraries open descriptors, so that forks can use the lowest numbers.
BOOT = """\
import os, sys
control = os.dup(0)
before = sys.path[:]
sys.path[:0] = sys.argv[1:]
import prorl_envs
sys.path[:] = before + [path for path in sys.argv[1:] if path not in before]
from prorl_envs.sandbox.template.zygote import main
main(control)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Request for a tool server: see `enter.join`, `kernel_settings.enter_and_limit` and `Sandbox.spawn`."""

    entry: str
    workdir: str
    env: Mapping[str, str]
    isolated: bool = True
    host_network: bool = False
    emulate_root: bool = False
    groups: tuple[str, ...] = ()
    rlimits: tuple[tuple[int, int, int], ...] = ()
    #: Set before it joins, if the program that created the sandbox could not set them.
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """Program that runs a template, in an environment that the program prepares.

    Args:
        command: precedes the template's own command.
        env: the program's environment; the program chooses the template's.
        explain: converts the program's output to an error if the template did not start.
        python: the template's own command, if it differs from the default.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    explain: Callable[[str], SandboxError]
    python: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Setup of a template that is the first process of a sandbox: see `sandbox_init.py`.

    Args:
        code: folder of this package inside.
        route: whether to add a default route.
        settings: settings of its namespaces, written if the kernel permits.
    """

    code: str
    route: bool = False
    settings: tuple[Setting, ...] = ()


class ToolServerProcess:
    """Process that a template has forked or spawned."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.answer: dict[str, Any] = {}
        #: Descriptor sent by the process; the caller that takes it owns it.
        self.passed: int | None = None
        #: Its pid as the template sees it; the host may see another.
        self.inner_pid = pid
        self.process = Process(pid_of(pidfd), pidfd)


class TemplateProcess:
    """Template process. The constructor starts it; `prepare` waits until it is ready. Arguments: see
    `Template`."""

    def __init__(
        self, name: str, nice: int, wrapper: Wrapper | None = None, *, filtered: bool = False
    ) -> None:
        self._name = name
        self._options = {"nice": nice, "filtered": filtered}
        self._wrapper = wrapper
        self._output = ""
        self.inner_pid: int | None = None
        #: Data and descriptors that the template has sent about itself.
        self.found: dict[str, Any] = {}
        self.descriptors: list[int] = []
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        not_in_forks(self._control)
        self._sending = asyncio.Lock()
        # A socket, because a program could open a pipe again through /proc.
        self._stderr, errors = socket.socketpair()
        self._stderr.setblocking(False)
        with inside, errors:
            self._child = subprocess.Popen(
                [*(wrapper.command if wrapper else ()), *((wrapper and wrapper.python) or _own_python())],
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors.fileno(),
                env=wrapper.env if wrapper else environment(),
                cwd="/",
                # Ctrl-C in the terminal must reach only the service, which then stops its templates in order.
                start_new_session=True,
            )
        self._process = Process.open(self._child.pid)
        asyncio.get_running_loop().add_reader(self._stderr, self._log_stderr)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def prepare(
        self,
        entries: tuple[str, ...],
        preload: tuple[str, ...],
        inside: Inside | None = None,
    ) -> None:
        """Make the process import everything, and wait until it is ready.

        Raises:
            SandboxError: an import failed, or took too long.
        """
        try:
            # No spare processes if a wrapper runs the template, because the wrapper may count its processes.
            spares = bool(entries) and self._wrapper is None
            setup = {"entries": entries, "preload": preload, "spares": spares}
            sandbox = {} if inside is None else {"inside": asdict(inside)}
            await self._send({**setup, **self._options, **sandbox}, [])
        except SandboxError:
            if self._wrapper is None:
                raise  # with a wrapper, its output has the reason: the code below reads it
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer, self.descriptors = await receive(self._control, MESSAGE_LIMIT, descriptors=2)
                if not answer and self._wrapper is not None:
                    await self._process.wait()
        except TimeoutError:
            raise SandboxError(f"template {self._name!r} was not ready in {_START_TIMEOUT_S} s") from None
        message: dict[str, Any] = json.loads(answer) if answer else {"error": "the process exited"}
        self.inner_pid, self.found = message.get("pid"), message
        if not answer and self._wrapper is not None:
            self._log_stderr()
            raise self._wrapper.explain(self._output)
        if "error" in message and self._wrapper is not None:  # caused by a site's settings
            raise self._wrapper.explain(message["error"].strip().splitlines()[-1])
        if "error" in message:
            raise SandboxError(f"template {self._name!r} did not start: {message['error'].strip()}")

    async def fork(
        self, sandbox_id: str, pidfd: int, request: ForkRequest, memory: int | None = None
    ) -> tuple[ToolServerProcess, socket.socket]:
        """Fork a process into the sandbox whose first process is `pidfd`; it gets a descriptor of `memory`.

        Returns:
            The process, and the host's end of its stream socket (non-blocking). The caller owns both.

        Raises:
            SandboxError: the process cannot join.
        """
        with contextlib.ExitStack() as undo:
            ours, theirs = _pair(socket.SOCK_STREAM, undo)
            more = [] if memory is None else [memory]
            message = {"sandbox": sandbox_id, **asdict(request)}
            server = await self._child_for(message, [pidfd, theirs.fileno(), *more])
            theirs.close()
            undo.pop_all()
            return server, ours

    async def route(self, netns: int) -> None:
        """Add a default route to the network namespace `netns` (a descriptor): see `route.py`.

        Raises:
            SandboxError: the kernel refused.
        """
        server = await self._child_for({"route": True}, [netns])
        await server.process.wait()

    async def open_socket(self, netns: int, *, netlink: bool = False) -> socket.socket:
        """Return a new IPv4 stream or netlink socket of the network namespace `netns` (a descriptor).

        The caller owns the socket, which belongs to that namespace.

        Raises:
            SandboxError: the kernel refused.
        """
        server = await self._child_for({"socket": "netlink" if netlink else "stream"}, [netns])
        assert server.passed is not None
        inside = socket.socket(fileno=server.passed)
        try:
            await server.process.wait()
        except BaseException:
            inside.close()
            raise
        return inside

    async def spawn(self, command: list[str], fds: list[int]) -> Process:
        """Start a program as a child of the template. The program survives the template's exit.

        Args:
            command: the program's path and arguments, its name first.
            fds: the descriptor for its standard streams, then those for its descriptors 3, 4, and so on.

        Raises:
            SandboxError: the process could not be created.
        """
        return (await self._child_for({"command": command}, fds)).process

    async def measure(self, fds: list[int], *, size: int, files: int) -> DiskUse:
        """Measure a directory tree in a separate process: see `disk_usage.measure`.

        Args:
            fds: descriptor of the tree's directory, and a pidfd of the sandbox's first process if it has one.

        Raises:
            SandboxError: the sandbox has stopped, or the measurement took too long.
        """
        server = await self._child_for({"measure": {"size": size, "files": files}}, fds)
        await server.process.wait()
        return DiskUse(*(server.answer[name] for name in ("size", "files", "too_deep")))

    async def checkpoint(
        self, first: int, memory: int | None, request: dict[str, Any], decide: Callable[..., Awaitable[bool]]
    ) -> list[str]:
        """Take a checkpoint in a separate process: see `checkpoint.checkpoint`.

        Args:
            first: pidfd of the sandbox's first process.
            memory: file for the memory of its Python session; None if it has none.
            decide: called with the report while the programs are stopped; returns whether to mount.

        Returns:
            What the saved memory lacks.

        Raises:
            SandboxError: the sandbox has stopped, or the kernel refused.
        """
        async with self._talk("checkpoint", request, first, memory) as talk:
            report = await _next_message(talk)
            talk.send(json.dumps({"mount": await decide(**report)}).encode())
            lost: list[str] = (await _next_message(talk))["lost"]
            return lost

    async def restore(self, first: int, memory: int, request: dict[str, Any]) -> None:
        """Restore the memory of a Python session: see `checkpoint.restore_memory`.

        Raises:
            SandboxError: the memory cannot be restored.
        """
        async with self._talk("restore_memory", request, first, memory) as talk:
            await _next_message(talk)

    @contextlib.asynccontextmanager
    async def _talk(
        self, function: str, request: dict[str, Any], first: int, memory: int | None
    ) -> AsyncIterator[socket.socket]:
        """Run a function of `checkpoint.py` in a child, which exits when the socket to it closes."""
        message = {"talk": f"{CHECKPOINT}:{function}", "request": request}
        with contextlib.ExitStack() as sockets:
            ours, theirs = _pair(socket.SOCK_SEQPACKET, sockets)
            await self._child_for(message, [first, theirs.fileno(), *([] if memory is None else [memory])])
            theirs.close()
            yield ours

    async def aclose(self) -> None:
        """Stop the template. Call once; must not be cancelled."""
        self._control.close()
        if self._wrapper is None and self.inner_pid is None:
            self._process.kill()  # it is importing modules, and has no children
        else:
            await self._end_in_order()
        await self._process.wait()
        self._process.close()
        self._child.wait()  # it has exited, and is only reaped here
        self._log_stderr()
        asyncio.get_running_loop().remove_reader(self._stderr)
        self._stderr.close()

    async def _end_in_order(self) -> None:
        """Wait until template and wrapper exit, because the control socket closed; else kill them.

        A template first kills its descendants, which would survive it otherwise.
        """
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("template %s did not exit within %g s and is killed", self._name, _END_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                # Not reaped yet, so the group is still this process's.
                os.killpg(self._child.pid, signal.SIGKILL)

    async def _child_for(self, message: dict[str, Any], fds: list[int]) -> ToolServerProcess:
        """Request a child that gets `fds`, and wait until it is ready."""
        with contextlib.ExitStack() as sockets, contextlib.ExitStack() as undo:
            status, theirs = _pair(socket.SOCK_SEQPACKET, sockets)
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    await self._send(message, [*fds, theirs.fileno()])
                    theirs.close()
                    server = await _await_child(status, undo)
            except TimeoutError:
                raise SandboxError(f"no process in the sandbox within {FORK_TIMEOUT_S} s") from None
            undo.pop_all()
            return server

    async def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_LIMIT:
            raise SandboxError("the environment is too large", hint=f"keep it under {MESSAGE_LIMIT} bytes")
        async with self._sending:
            while True:
                try:
                    socket.send_fds(self._control, [data], fds)
                except BlockingIOError:
                    await writable(self._control.fileno())
                except (BrokenPipeError, ConnectionResetError):
                    raise SandboxError(f"template {self._name!r} has died") from None
                else:
                    return

    def _log_stderr(self) -> None:
        try:
            text = self._stderr.recv(2 * REPORT_LIMIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            text = b""
        if text and self._wrapper is not None and self.inner_pid is None:
            self._output = (self._output + text.decode(errors="replace"))[-_OUTPUT_LIMIT:]
        elif text:
            logger.warning("template %s: %s", self._name, printable(text.decode(errors="replace").rstrip()))
        else:
            asyncio.get_running_loop().remove_reader(self._stderr)


async def _next_message(talk: socket.socket) -> dict[str, Any]:
    """Return the next message of a child. Raises SandboxError if the child failed or takes too long."""
    try:
        async with asyncio.timeout(FORK_TIMEOUT_S):
            data, _ = await receive(talk, 2 * REPORT_LIMIT)
    except TimeoutError:
        raise SandboxError(f"the programs of the sandbox did not stop within {FORK_TIMEOUT_S:g} s") from None
    message: dict[str, Any] = json.loads(data) if data else {"failure": "the process exited"}
    if "failure" in message:
        raise SandboxError(f"no checkpoint: {message['failure']}")
    return message


async def _await_child(status: socket.socket, undo: contextlib.ExitStack) -> ToolServerProcess:
    """Wait for the template's message (the child's pid and pidfd) and for the child's (it is ready).

    They arrive in either order; for a spawned program, as one message.
    """
    server: ToolServerProcess | None = None
    joined: dict[str, Any] = {}
    passed: int | None = None
    while server is None or not joined:
        answer, fds = await receive(status, 2 * REPORT_LIMIT, descriptors=1)
        message: dict[str, Any] = json.loads(answer) if answer else {"summary": "the process exited"}
        if "pid" in message:
            server = ToolServerProcess(message["pid"], fds[0])
            undo.callback(server.process.close)
            undo.callback(server.process.kill)
            if message.get("ready"):
                joined = message
        elif message.get("ready"):
            joined = message
            if fds:
                [passed] = fds
                undo.callback(os.close, passed)
        else:
            raise SandboxError(
                f"a process could not join the sandbox: {message['summary']}",
                hint="the sandbox may have stopped; `prorl-envs doctor` checks this machine",
            ) from _cause(message)
    server.answer = joined
    server.passed = passed
    return server


def _cause(report: dict[str, Any]) -> OSError | None:
    """Return the system error that a failed fork reports, if any: see `counters.full_counter_errno`."""
    number = report.get("errno")
    return OSError(number, os.strerror(number)) if isinstance(number, int) else None


def _pair(kind: socket.SocketKind, undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    undo.enter_context(ours)
    undo.enter_context(theirs)
    ours.setblocking(False)
    return ours, theirs


def _own_python() -> list[str]:
    return [sys.executable, "-I", "-c", BOOT, *_code_paths()]


def _code_paths() -> Iterator[str]:
    for folder in prorl_envs.__path__:
        yield str(Path(folder).resolve().parent)


def environment() -> dict[str, str]:
    """Return an environment without the service's variables, except its library path."""
    variables = {"LANG": "C.UTF-8"}
    if library_path := os.environ.get("LD_LIBRARY_PATH"):
        variables["LD_LIBRARY_PATH"] = library_path
    return variables
