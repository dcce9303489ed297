"""A real Jupyter kernel in the sandbox, run by the image's own interpreter.

It listens on Unix sockets in a folder of the workspace that is gone once they are connected. The folder's
content is hostile: the host opens each socket through descriptors that follow no link, and connects to what
it has opened.
"""

import asyncio
import os
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

from prorl_envs.errors import ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.connection import ServerLost
from prorl_envs.tools.jupyter_output import CellOutput
from prorl_envs.tools.link import ServerLink, ToolLimits
from prorl_envs.tools.results import python_result
from prorl_envs.tools.types import ToolResult
from prorl_envs.tools.wire import Done, PythonDone, Run, RunDone, Write

#: Seconds a kernel may take to answer for the first time.
START_TIMEOUT_S = 60.0
#: Bytes of one message, and messages that may wait, of each channel. A kernel that sends a longer one is cut
#: off, and its session ends at the cell's deadline.
MESSAGE_LIMIT = 16 * 1024 * 1024
MESSAGES_WAITING = 16
#: What messages that are not as they should be lead to, in the client's libraries or here.
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
_LIFETIME_S = 30 * 86400.0
_PORTS = {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "control_port": 4, "hb_port": 5}


class JupyterPython:
    """A persistent session in a Jupyter kernel.

    Args:
        sandbox: where it runs.
        limits: its bounds.
        interpreter: the image's Python, which must have ipykernel.
    """

    def __init__(self, sandbox: Sandbox, limits: ToolLimits, *, interpreter: str = "python3") -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._interpreter = interpreter
        self._link = ServerLink(sandbox, "base", limits, python=False)
        self._kernel: _Kernel | None = None
        self._lock = asyncio.Lock()
        self._notice = ""

    async def start(self) -> None:
        self._kernel = await _Kernel.start(self._link, self._interpreter)

    async def run(self, code: str, *, timeout_s: float) -> ToolResult:
        started = time.monotonic()
        async with self._lock:
            if self._kernel is None:
                await self.start()
            assert self._kernel is not None
            output = CellOutput(self._limits.output_bytes)
            try:
                done = await self._execute(self._kernel, code, output, timeout_s)
            except BaseException:
                # Cancelled, or lost: it might still be busy, so the next cell gets a new one.
                await self._end()
                raise
        if done.notice and not self._sandbox.alive:
            raise self._sandbox.ended()
        return python_result(done, "", time.monotonic() - started)

    async def aclose(self) -> None:
        await self._end()
        await self._link.aclose()

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
    """The kernel ended, or broke the protocol; the message goes on after "the Python session"."""


class _Kernel:
    """A kernel process and a client connected to it."""

    def __init__(self, process: "asyncio.Task[RunDone]") -> None:
        self._process = process
        self._context = zmq.asyncio.Context()
        # Defaults of the sockets made from it: the other side is hostile.
        self._context.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
        self._context.setsockopt(zmq.RCVHWM, MESSAGES_WAITING)
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = AsyncKernelClient(context=self._context)
        self._cell = ""
        self._ready = False

    @classmethod
    async def start(cls, link: ServerLink, interpreter: str) -> "_Kernel":
        """Start the process in the sandbox and connect.

        Raises:
            ToolError: it does not start; with its own words.
        """
        name = f".kernel-{secrets.token_hex(6)}"
        inside = f"{link.sandbox.spec.workdir}/{name}"
        key = secrets.token_hex(32)
        info = {
            "transport": "ipc",
            "signature_scheme": "hmac-sha256",
            "key": key,
            "kernel_name": "",
            **_PORTS,
        }
        data = msgspec.json.encode({**info, "ip": f"{inside}/k"})
        await link.ask(lambda id_: Write(id_, f"{inside}/info.json", data, 0o600), Done, timeout_s=30)
        argv = [interpreter, "-m", "ipykernel_launcher", "-f", f"{inside}/info.json"]
        process = asyncio.create_task(_run(link, argv, _LIFETIME_S))
        kernel = cls(process)
        try:
            listening = "for n in 1 2 3 4 5; do until [ -S $0/k-$n ]; do sleep 0.02; done; done"
            await kernel.while_alive(_run(link, ["sh", "-c", listening, inside], START_TIMEOUT_S))
            await kernel._connect(link.sandbox.workspace, name, info)
        except BaseException as error:
            await kernel.aclose()
            if isinstance(error, _KernelEnded):
                raise ToolError(f"the Jupyter kernel {error}", hint="the image needs ipykernel") from None
            raise
        finally:
            await _run(link, ["rm", "-rf", inside], 30)
        return kernel

    async def execute(self, code: str, output: CellOutput, timeout_s: float) -> bool:
        """Run a cell; False where it has not ended in time.

        Raises:
            _KernelEnded: the kernel ended instead.
        """
        self._cell = self._client.execute(code, store_history=True, allow_stdin=False)
        return await self._follow(output, timeout_s)

    async def interrupt(self, output: CellOutput, grace_s: float) -> bool:
        """Interrupt the cell; False where it goes on."""
        message = self._client.session.msg("interrupt_request", {})
        self._client.control_channel.send(message)
        return await self._follow(output, grace_s)

    async def while_alive[T](self, work: "asyncio.Future[T] | Any") -> T:
        """Await something as long as the kernel lives.

        Raises:
            _KernelEnded: it ended first.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._process}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            try:
                done = self._process.result()
            except ServerLost as lost:
                raise _KernelEnded(f"was lost ({lost.message})") from lost
            words = "" if self._ready else done.output.decode(errors="replace").strip()[-500:]
            raise _KernelEnded(f"exited with status {done.exit_code}{f' ({words})' if words else ''}")
        result: T = task.result()
        return result

    async def aclose(self) -> None:
        """Kill the process and close every socket."""
        self._process.cancel()
        await asyncio.gather(self._process, return_exceptions=True)
        self._client.stop_channels()
        self._context.destroy(linger=0)

    async def _connect(self, workspace: Path, name: str, info: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="prk-"))
        descriptors: list[int] = []
        try:
            for number in _PORTS.values():
                fd = _open_socket(workspace, name, f"k-{number}")
                descriptors.append(fd)
                (folder / f"k-{number}").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            info["ip"] = str(folder / "k")
            self._client.load_connection_info(info)
            self._client.start_channels(stdin=False, hb=False, control=True)
            await self.while_alive(self._client.wait_for_ready(timeout=START_TIMEOUT_S))
            # The control channel too must be connected before the way to it goes.
            self._client.control_channel.send(self._client.session.msg("kernel_info_request", {}))
            await self.while_alive(self._client.get_control_msg(timeout=START_TIMEOUT_S))
            self._ready = True
        except OSError as error:
            raise ToolError(f"the Jupyter kernel's sockets cannot be opened: {error}") from error
        finally:
            for fd in descriptors:
                os.close(fd)
            shutil.rmtree(folder)

    async def _follow(self, output: CellOutput, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._next(output):
                    pass
                await self.while_alive(self._client.get_shell_msg())
        except TimeoutError:
            return False
        except _BREACHES as error:
            raise _KernelEnded(f"broke the protocol ({type(error).__name__})") from error
        return True

    async def _next(self, output: CellOutput) -> bool:
        message: dict[str, Any] = await self.while_alive(self._client.get_iopub_msg())
        if message["parent_header"].get("msg_id") != self._cell:
            return False
        return output.take(message["msg_type"], message["content"])


async def _run(link: ServerLink, argv: list[str], timeout_s: float) -> RunDone:
    return await link.ask(
        lambda id_: Run(id_, argv, "", {}, b"", timeout_s, 65536), RunDone, timeout_s=timeout_s
    )


def _open_socket(workspace: Path, folder: str, name: str) -> int:
    """Open a socket's file, following no link below `workspace`. The caller closes it."""
    root = os.open(workspace, os.O_PATH | os.O_DIRECTORY)
    try:
        parent = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    finally:
        os.close(root)
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is not a socket")
    return fd
