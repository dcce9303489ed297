"""Jupyter kernel in the sandbox, run by the image's own interpreter.

The kernel listens on Unix sockets in a directory in the sandbox's `socket_directory`. The directory is
deleted once the host is connected. Its content is untrusted: the host opens each socket through descriptors
that follow no link, and connects to the opened file.
"""

import asyncio
import contextlib
import math
import os
import posixpath
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from jupyter_client.asynchronous.client import AsyncKernelClient

from prorl_envs.errors import EnvironmentFault, InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.sandbox.filesystem.directories import node_local_base
from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.tools.client.connection import ServerLost, ToolConnection, ToolLimits
from prorl_envs.tools.client.jupyter_output import CellOutput
from prorl_envs.tools.client.jupyter_setup import SETUP
from prorl_envs.tools.client.results import python_result
from prorl_envs.tools.protocol.messages import Done, PythonDone, Run, RunDone, Write
from prorl_envs.tools.types import ToolResult

#: Timeout of a kernel's first answer, in seconds.
START_TIMEOUT_S = 60.0
#: Maximum bytes of one message, and maximum queued messages, per channel. A kernel that sends a longer
#: message is disconnected, and its session is closed at the cell's deadline.
MESSAGE_LIMIT = 16 * 1024 * 1024
MESSAGES_WAITING = 16
#: Exceptions that malformed messages cause, in the client's libraries or here.
_BREACHES = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    zmq.ZMQError,
    msgspec.MsgspecError,
)
#: As in `server/python_kernel.py`. Otherwise SQLite writes each cell to a file in the sandbox, and opens that
#: file's folder for a moment, which looks like a leaked descriptor.
_NO_HISTORY = ("--HistoryManager.enabled=False", "--HistoryManager.hist_file=:memory:")
#: Seconds after `execute_input` during which a cell is not interrupted: before its own code runs, ipykernel
#: and IPython ignore or swallow interrupts (6 of 300 cells that were cancelled in their first 20 ms).
_FIRST_S = 0.05
#: Seconds to wait for a kernel's exit after its output connection closed.
_END_S = 5.0
_LIFETIME_S = 30 * 86400.0
_REMEDY = "install ipykernel in the image, for the python3 that comes first in its PATH: docs/environments.md"
_PORTS = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "control_port": 4, "hb_port": 5}


class JupyterPython:
    """Persistent session in a Jupyter kernel.

    Args:
        sandbox: the sandbox in which the kernel runs.
        limits: bounds of the session.
        interpreter: the image's Python, which must have ipykernel.
    """

    def __init__(self, sandbox: Sandbox, limits: ToolLimits, *, interpreter: str) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._interpreter = interpreter
        self._link = ToolConnection(sandbox, limits)
        self._kernel: _Kernel | None = None
        self._lock = asyncio.Lock()
        #: Interrupts the cell of a cancelled call.
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._kernel = await _Kernel.start(self._link, self._interpreter)

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        started = time.monotonic()
        async with self._lock:
            await self._wait_until_stopped()
            before = await self._end_notice()
            if self._kernel is None:
                await self.start()
            assert self._kernel is not None
            output = CellOutput(self._limits.output_bytes)
            try:
                done = await self._execute(self._kernel, code, output, timeout_s)
            except asyncio.CancelledError:
                self._stopping = asyncio.create_task(self._stop(self._kernel, output))
                raise
            except BaseException:
                await self._end()  # the kernel may still be busy, so the next cell gets a new kernel
                raise
        if done.notice and not self._sandbox.alive:
            raise self._sandbox.end_error()
        done.notice = "\n".join(filter(None, [before, done.notice]))
        return python_result(done, "", time.monotonic() - started)

    def connection_file(self) -> Path:
        """Return the connection file: see `Toolbox.jupyter_connection_file`."""
        if self._kernel is None:
            raise InputError("no kernel runs", hint="the next cell starts one")
        return self._kernel.connection_file()

    async def aclose(self) -> None:
        await self._end()
        await self._wait_until_stopped()
        await self._link.aclose()

    async def _stop(self, kernel: "_Kernel", output: CellOutput) -> None:
        """Interrupt the running cell. Close the kernel if the cell continues or the kernel has stopped."""
        with contextlib.suppress(_KernelEnded):
            if await kernel.interrupt(output, self._limits.grace_s):
                return
        await self._end()

    async def _wait_until_stopped(self) -> None:
        """Wait until the cell of a cancelled call has stopped."""
        if self._stopping is not None:
            await asyncio.wait({self._stopping})
            self._stopping = None

    async def _end_notice(self) -> str:
        """Return a notice for the model if the kernel has stopped since the last cell, else ""."""
        if self._kernel is None or not (ended := self._kernel.ended):
            return ""
        await self._end()
        return f"[before this cell, the Python session {ended}; this is a new one, without its variables]"

    async def _execute(
        self, kernel: "_Kernel", code: str, output: CellOutput, timeout_s: float
    ) -> PythonDone:
        stopped = ""
        try:
            if not await kernel.execute(code, output, timeout_s):
                stopped = f"[timed out after {timeout_s:g} s: it was interrupted]"
                if not await kernel.interrupt(output, self._limits.grace_s):
                    stopped = f"[timed out after {timeout_s:g} s: it ignored the interrupt and was killed]"
                    raise _KernelEnded("was killed")
        except _KernelEnded as ended:
            await self._end()
            notice = f"[the Python session {ended}; the next cell gets a new one, without its variables]"
            notices = "\n".join(filter(None, [stopped, notice]))
            return output.reply(timed_out=bool(stopped), notice=notices, error="SessionEnded")
        return output.reply(timed_out=bool(stopped), notice=stopped)

    async def _end(self) -> None:
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.aclose()


class _KernelEnded(Exception):
    """The kernel stopped, or broke the protocol; the message completes "the Python session ..."."""


class _Kernel:
    """Kernel process and a client connected to it."""

    def __init__(self, process: "asyncio.Task[RunDone]", info: dict[str, Any]) -> None:
        self._process = process
        self._info = info
        self._context = zmq.asyncio.Context()
        # Defaults of all sockets of this context, because the peer is untrusted.
        self._context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
        self._context.setsockopt(zmq.RCVHWM, MESSAGES_WAITING)
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = AsyncKernelClient(context=self._context)
        self._cut_off: asyncio.Task[None] | None = None
        self._sockets: dict[int, int] = {}
        self._attachment: Path | None = None
        self._cell = ""
        self._cell_start = math.inf
        self._cell_done = False
        self._reading: asyncio.Future[dict[str, Any]] | None = None
        self._ready = False

    @classmethod
    async def start(cls, link: ToolConnection, interpreter: str) -> "_Kernel":
        """Start the process in the sandbox and connect.

        Raises:
            EnvironmentFault: the sandbox lacks the interpreter or ipykernel.
            ToolError: the kernel did not start for another reason; the message includes its output.
        """
        parent_inside, parent = link.sandbox.socket_directory
        name = f".kernel-{secrets.token_hex(6)}"
        inside = f"{parent_inside}{name}"
        key = secrets.token_hex(32)
        info = {
            "transport": "ipc",
            "signature_scheme": "hmac-sha256",
            "key": key,
            "kernel_name": "",
            **_PORTS,
        }
        data = msgspec.json.encode({**info, "ip": f"{inside}/k"})
        file = link.sandbox.path_inside(posixpath.join(link.sandbox.spec.workdir, inside, "info.json"))
        await link.ask(lambda id_: Write(id_, file, data, 0o600), Done, timeout_s=30)
        argv = [interpreter, "-m", "ipykernel_launcher", "-f", f"{inside}/info.json", *_NO_HISTORY]
        process = asyncio.create_task(_run(link, argv, _LIFETIME_S))
        kernel = cls(process, info)
        try:
            listening = "for n in 1 2 3 4 5; do until [ -S $0/k-$n ]; do sleep 0.02; done; done"
            await kernel.while_alive(_run(link, ["sh", "-c", listening, inside], START_TIMEOUT_S))
            await kernel._connect(parent, name)
        except BaseException as error:
            await kernel.aclose()
            if isinstance(error, OSError):
                raise EnvironmentFault(f"{interpreter} cannot be started: {error}", hint=_REMEDY) from error
            if isinstance(error, _KernelEnded):
                if "No module named" in str(error):
                    raise EnvironmentFault(f"the Jupyter kernel {error}", hint=_REMEDY) from None
                raise ToolError(f"the Jupyter kernel {error}") from None
            raise
        finally:
            await _run(link, ["rm", "-rf", inside], 30)
        return kernel

    async def execute(self, code: str, output: CellOutput, timeout_s: float, *, silent: bool = False) -> bool:
        """Run a cell; return False if it has not finished in time.

        Raises:
            _KernelEnded: the kernel stopped.
        """
        self._cell_start, self._cell_done = math.inf, False
        # Otherwise an old ipykernel skips a cell that arrives soon after one that failed or was interrupted.
        self._cell = self._client.execute(
            code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False
        )
        return await self._follow(output, timeout_s)

    async def interrupt(self, output: CellOutput, grace_s: float) -> bool:
        """Interrupt the cell; return False if it is still running after `grace_s`."""
        return await self._follow(output, grace_s, interrupt=True)

    async def while_alive[T](self, work: "asyncio.Future[T] | Any") -> T:
        """Return the result of `work`; cancel it if the kernel stops.

        Raises:
            _KernelEnded: the kernel stopped first.
        """
        task = asyncio.ensure_future(work)
        others = filter(None, (self._process, self._cut_off))
        try:
            await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise _KernelEnded(self.ended)
        result: T = task.result()
        return result

    @property
    def ended(self) -> str:
        """Completion of "the Python session ..." with the reason for its end; "" while the kernel lives."""
        if self._process.cancelled():
            return "was ended"
        if not self._process.done():
            cut_off = self._cut_off is not None and self._cut_off.done()
            return f"sent a message of more than {MESSAGE_LIMIT} bytes, and was killed" if cut_off else ""
        try:
            done = self._process.result()
        except ServerLost as lost:
            return f"was lost ({lost.message})"
        startup_output = "" if self._ready else done.output.decode(errors="replace").strip()[-500:]
        return f"exited with status {done.exit_code}{f' ({startup_output})' if startup_output else ''}"

    def connection_file(self) -> Path:
        """Write the connection file for a Jupyter client; it is deleted when the kernel stops."""
        if self._attachment is None:
            folder = self._attachment = self._link_sockets()
            path = folder / "kernel.json"
            path.touch(mode=0o600)
            path.write_bytes(msgspec.json.encode({**self._info, "ip": str(folder / "k")}))
        return self._attachment / "kernel.json"

    async def aclose(self) -> None:
        """Kill the process and close every socket."""
        tasks = [task for task in (self._process, self._cut_off, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.stop_channels()
        self._context.destroy(linger=0)
        if self._attachment is not None:
            shutil.rmtree(self._attachment)
        for fd in self._sockets.values():
            os.close(fd)
        self._sockets.clear()

    def _link_sockets(self) -> Path:
        """Create a directory with a short link to the opened file of each socket.

        The links are valid while this process lives, independent of the sandbox's own directory.
        """
        folder = Path(tempfile.mkdtemp(prefix="prk-", dir=node_local_base()))
        for number, fd in self._sockets.items():
            (folder / f"k-{number}").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return folder

    async def _connect(self, parent: Path, name: str) -> None:
        try:
            for number in _PORTS.values():
                self._sockets[number] = _open_socket(parent, name, f"k-{number}")
        except OSError as error:
            raise ToolError(f"the Jupyter kernel's sockets cannot be opened: {error}") from error
        folder = self._link_sockets()
        try:
            info: Any = {**self._info, "ip": str(folder / "k")}
            self._client.load_connection_info(info)
            self._client.start_channels(stdin=False, hb=False, control=True)
            await self.while_alive(self._client.wait_for_ready(timeout=START_TIMEOUT_S))
            # The control channel must also be connected before the directory is deleted.
            self._client.control_channel.send(self._client.session.msg("kernel_info_request", {}))
            await self.while_alive(self._client.get_control_msg(timeout=START_TIMEOUT_S))
            self._cut_off = asyncio.create_task(self._until_cut_off())
            await self.execute(SETUP, CellOutput(0), START_TIMEOUT_S, silent=True)
            self._ready = True
        finally:
            shutil.rmtree(folder)

    async def _until_cut_off(self) -> None:
        """Wait until the output connection closes while the kernel lives, because a message was too long."""
        sock = self._client.iopub_channel.socket
        monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            await monitor.recv_multipart()
        finally:
            sock.disable_monitor()
        # If the kernel has exited, its status will be known soon.
        await asyncio.wait({self._process}, timeout=_END_S)

    async def _follow(self, output: CellOutput, timeout_s: float, *, interrupt: bool = False) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                sent = False
                while not self._cell_done:
                    if interrupt and not sent and self._cell_start < math.inf:
                        await asyncio.sleep(self._cell_start + _FIRST_S - time.monotonic())
                        self._client.control_channel.send(self._client.session.msg("interrupt_request", {}))
                        sent = True
                    await self._next(output)
                if interrupt:  # just before or after the cell's code, an interrupt suppresses the reply
                    return True
                while (reply := await self._reply())["parent_header"].get("msg_id") != self._cell:
                    pass  # reply to a request sent during the start
                output.take(reply["msg_type"], reply["content"])
                if any(part["source"] == "ask_exit" for part in reply["content"].get("payload", ())):
                    await self.while_alive(asyncio.Event().wait())  # exit(): the kernel exits shortly
        except TimeoutError:
            return False
        except _BREACHES as error:
            raise _KernelEnded(f"broke the protocol ({type(error).__name__})") from error
        return True

    async def _reply(self) -> dict[str, Any]:
        reply: dict[str, Any] = await self.while_alive(self._client.get_shell_msg())
        return reply

    async def _next(self, output: CellOutput) -> None:
        """Process the next message of the output channel. If the wait is cancelled, no message is lost."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._client.get_iopub_msg())
        message: dict[str, Any] = await self.while_alive(asyncio.shield(self._reading))
        self._reading = None
        if message["parent_header"].get("msg_id") != self._cell:
            return
        if message["msg_type"] == "execute_input":
            self._cell_start = min(self._cell_start, time.monotonic())
        self._cell_done = output.take(message["msg_type"], message["content"])


async def _run(link: ToolConnection, argv: list[str], timeout_s: float) -> RunDone:
    return await link.ask(
        lambda id_: Run(id_, argv, "", {}, b"", timeout_s, 65536), RunDone, timeout_s=timeout_s
    )


def _open_socket(parent: Path, folder: str, name: str) -> int:
    """Open a socket's file, following no link below `parent`. The caller closes the descriptor."""
    with (
        opened(parent, os.O_PATH | os.O_DIRECTORY) as root,
        opened(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root) as directory,
    ):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory)
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is not a socket")
    return fd
