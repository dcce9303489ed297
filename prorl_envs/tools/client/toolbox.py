"""Host side of a sandbox's tools."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from prorl_envs.errors import InputError, ToolError, UnsupportedMachine
from prorl_envs.sandbox.base import Checkpoint, CheckpointingSandbox, Sandbox
from prorl_envs.tools.client import transfer
from prorl_envs.tools.client.arguments import read_arguments
from prorl_envs.tools.client.connection import ServerLost, ToolConnection, ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.results import bash_result, python_result, server_lost, with_notices
from prorl_envs.tools.protocol.messages import (
    CONTENT_LIMIT,
    Bash,
    BashDone,
    Content,
    Done,
    Edit,
    Edited,
    EndProcesses,
    Patch,
    Python,
    PythonDone,
    Read,
    Request,
    RestoreShell,
    Run,
    RunDone,
    SavedShell,
    SaveShell,
    Write,
)
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits, is_utf8
from prorl_envs.tools.schemas import APPLY_PATCH, BASH, EDITOR, PYTHON
from prorl_envs.tools.types import Completed, ToolCall, ToolResult

if TYPE_CHECKING:
    from prorl_envs.tools.client.jupyter import JupyterPython

#: Maximum characters of the name of a shell session.
SESSION_NAME_LIMIT = 64


class Toolbox:
    """Tools of one sandbox. Created by `open`; the creator closes it before the sandbox.

    Calls of different kinds and sessions may be in flight together; calls of one session run in order.
    Cancelling a call stops the work it started and leaves the toolbox usable.
    """

    def __init__(self, sandbox: Sandbox, python: PythonEngine, limits: ToolLimits, interpreter: str) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._server = ToolConnection(sandbox, limits)
        self._forked: ToolConnection | None = None
        self._kernel: JupyterPython | None = None
        if python is PythonEngine.FORKED:
            self._forked = ToolConnection(sandbox, limits, python=True)
        elif python is PythonEngine.KERNEL:
            # Imported only here: the libraries take 0.2 s to import.
            from prorl_envs.tools.client import jupyter

            self._kernel = jupyter.JupyterPython(sandbox, limits, interpreter=interpreter)

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        *,
        python: PythonEngine = PythonEngine.NONE,
        limits: ToolLimits | None = None,
        interpreter: str = "python3",
    ) -> Self:
        """Open the tools of a running sandbox.

        The Python session, if requested, starts now. The tool server and the shell start at the first call.
        The sessions go on from the checkpoint of the sandbox's spec, if it has one.

        Args:
            sandbox: the running sandbox; its owner still closes it.
            python: engine for Python cells.
            limits: bounds of outputs and times.
            interpreter: for a Jupyter kernel, the image's Python: a name in its PATH, or an absolute path.

        Raises:
            SandboxError: the sandbox has stopped or cannot be joined.
            ToolError: a server does not answer.
            EnvironmentFault: the sandbox lacks what a Jupyter kernel needs.
        """
        if not sandbox.alive:
            raise sandbox.end_error()
        toolbox = cls(sandbox, PythonEngine(python), limits or ToolLimits(), interpreter)
        try:
            if (session := toolbox._forked or toolbox._kernel) is not None:
                await session.start()
            if sandbox.spec.checkpoint is not None:
                for name, (state, status) in sandbox.spec.checkpoint.shells.items():
                    await toolbox._restore_shell(name, state, status)
        except BaseException:
            await toolbox.aclose()
            raise
        return toolbox

    async def bash(
        self,
        command: str,
        *,
        timeout_s: float,
        session: str = "main",
        is_input: bool = False,
        restart: bool = False,
    ) -> ToolResult:
        """Run a command in a persistent shell, or type into a command that waits for input.

        Args:
            command: any text bash can evaluate. As input, it is typed with Enter appended; names of keys
                (`C-c`, `C-d`, others in `keys.KEYS`) are typed without Enter, and an empty text waits for
                more output.
            timeout_s: seconds after which the command is interrupted, then killed.
            session: name of the shell; a new one is started at first use.
            is_input: True if the text is input for a waiting command.
            restart: first kill the session's shell and its processes, except background jobs.

        Returns:
            The output, then the exit status if it is not 0, then notes about the command or shell. Returns
            early, with `waiting` true, if the command waits for input (see
            `tools/server/input_detection.py`).
            `data`: exit_code (None if stopped or waiting), cwd, timed_out, waiting.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        if "\0" in command or not is_utf8(command):
            return ToolResult(text="the command holds a character that bash cannot take", ok=False)
        if len(session) > SESSION_NAME_LIMIT or not is_utf8(session):
            return ToolResult(text=f"a session's name has at most {SESSION_NAME_LIMIT} characters", ok=False)
        result = await self._server.call(
            session,
            "shell",
            lambda id_: Bash(id_, session, command, timeout_s, is_input, restart),
            BashDone,
            bash_result,
            timeout_s=timeout_s,
        )
        return self._noted(result)

    async def python(self, code: str, *, timeout_s: float) -> ToolResult:
        """Run a cell in the persistent Python session.

        Args:
            code: Python, with IPython's magics.
            timeout_s: seconds after which the cell is interrupted, then killed with the session.

        Returns:
            The cell's printed output, the value of its last expression and its traceback, in order; then
            notes about the session. `data`: error (class name or None), timed_out, display (bundles of MIME
            type and content, if there are any).

        Raises:
            InputError: this toolbox has no Python session.
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        if not is_utf8(code):
            return ToolResult(text="the code holds a character that Python cannot take", ok=False)
        if self._kernel is not None:
            return self._noted(await self._kernel.run(code, timeout_s=timeout_s))
        if self._forked is None:
            raise InputError("this toolbox has no Python session", hint="open it with a Python engine")
        result = await self._forked.call(
            "",
            "Python session",
            lambda id_: Python(id_, code, timeout_s),
            PythonDone,
            python_result,
            timeout_s=timeout_s,
        )
        return self._noted(result)

    def jupyter_connection_file(self) -> Path:
        """Return the path of the Jupyter kernel's connection file, for a Jupyter client of this user.

        The file is deleted when the kernel stops. Messages to the client are as untrusted as the cells.

        Raises:
            InputError: this toolbox has no Jupyter kernel, or none runs.
        """
        if self._kernel is None:
            raise InputError(
                "this toolbox has no Jupyter kernel",
                hint="set python: kernel for the environment, or open the toolbox with PythonEngine.KERNEL",
            )
        return self._kernel.connection_file()

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Execute a model's call of a built-in tool (`schemas.py`).

        Args:
            call: the call; untrusted in every part.
            timeout_s: seconds a command or cell may take.

        Returns:
            `ok=False` with a message for the model if the tool or its arguments are wrong, or if an edit or a
            patch does not apply.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        python = () if (self._forked or self._kernel) is None else (PYTHON,)
        spec = next((spec for spec in (BASH, *python, EDITOR, APPLY_PATCH) if spec.name == call.name), None)
        if spec is None:
            return ToolResult(text=f"there is no tool {call.name[:50]!r}", ok=False)
        read = read_arguments(spec, call.arguments)
        if isinstance(read, str):
            return ToolResult(text=read, ok=False)
        if spec is BASH:
            return await self.bash(**read, timeout_s=timeout_s)
        if spec is PYTHON:
            return await self.python(read["code"], timeout_s=timeout_s)
        if spec is EDITOR:
            inner = self.sandbox.path_inside(read["path"])
            return await self._edit(lambda id_: Edit(id_, **{**read, "path": inner}))
        return await self._edit(lambda id_: Patch(id_, read["input"]))

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float,
        output_limit: int = 1024 * 1024,
        apart: bool = False,
        background: bool = False,
    ) -> Completed:
        """Run a fresh process; its process group is killed when the process exits or at the deadline.

        Args:
            argv: program and arguments.
            cwd: absolute directory; empty means the sandbox's workspace.
            env: variables on top of the sandbox's own.
            stdin: input of the process; empty means the null device.
            timeout_s: seconds after which the process is killed.
            output_limit: bytes kept of the output, or of each stream if stderr is kept apart.
            apart: keep stderr apart from stdout.
            background: let background processes continue after the process exits by itself; their later
                output is lost.

        Raises:
            OSError: as a local start would raise (no such program, no such directory).
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        inner = self.sandbox.path_inside(cwd) if cwd else ""

        def make(id_: int) -> Run:
            return Run(
                id_, list(argv), inner, dict(env or {}), stdin, timeout_s, output_limit, apart, background
            )

        done = await self._server.ask(make, RunDone, timeout_s=timeout_s)
        if done.exit_code is not None and done.exit_code < 0 and not self.sandbox.alive:
            # The sandbox stopped: it killed the process and, after the reply, the tool server.
            raise self.sandbox.end_error()
        return Completed(
            exit_code=done.exit_code,
            output=done.output,
            timed_out=done.timed_out,
            truncated_bytes=done.omitted,
            duration_s=done.duration_s,
            errors=done.errors,
        )

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file atomically, with the sandbox's own rights; create missing directories.

        Raises:
            InputError: `data` has more than `messages.CONTENT_LIMIT` bytes.
            OSError: as a local write would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        if len(data) > CONTENT_LIMIT:
            raise InputError(
                f"{len(data)} bytes are too many for one write", hint="upload a file, or use a mount"
            )
        inner = self.sandbox.path_inside(path, write=True)
        await self._server.ask(
            lambda id_: Write(id_, inner, data, mode), Done, timeout_s=self.limits.transfer_s
        )

    async def read(self, path: str, *, limit: int = CONTENT_LIMIT) -> bytes:
        """Return the first `limit` bytes of a regular file. The content is untrusted.

        Raises:
            OSError: as a local read would raise; also if the path is not a regular file.
            SandboxError, ToolError: our infrastructure failed.
        """
        inner = self.sandbox.path_inside(path)
        timeout_s = self.limits.transfer_s
        return (
            await self._server.ask(lambda id_: Read(id_, inner, limit), Content, timeout_s=timeout_s)
        ).data

    async def upload(self, source: Path, target: str, *, timeout_s: float) -> Transferred:
        """Copy a file or a tree of the host into the sandbox, with the sandbox's own rights.

        A file is created or replaced. A tree is merged into an existing one: its files and links are created
        or replaced, each atomically; other files stay. No link below `target` is followed. After a failure,
        the entries copied so far stay. `protocol/tree.py` lists the supported kinds of files.

        Args:
            source: path on the host.
            target: absolute path inside; missing directories are created.
            timeout_s: seconds the copy may take.

        Raises:
            TransferRefused: the tree holds an unsupported kind of file, or is too large.
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        inner = self.sandbox.path_inside(target, write=True)
        return await transfer.upload(self.sandbox, source, inner, timeout_s)

    async def download(
        self,
        source: str,
        target: Path,
        *,
        timeout_s: float,
        limits: TreeLimits | None = None,
        skip_unsupported: bool = False,
    ) -> Transferred:
        """Copy a file or a tree out of the sandbox, completely or not at all. The content is untrusted.

        The copy holds no link that leads out of it, no device, pipe or socket, and no set-id bit. Processes
        in the sandbox may change the tree while it is read.

        Args:
            source: absolute path inside.
            target: path on the host; must not exist, but its parent must.
            timeout_s: seconds the copy may take.
            limits: maximum size of the tree.
            skip_unsupported: skip unsupported files and name them in the result, instead of failing.

        Raises:
            InputError: `target` exists.
            TransferRefused: the tree holds an unsupported kind of file, or is too large.
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        return await transfer.download(
            self.sandbox,
            self.sandbox.path_inside(source),
            target,
            limits or TreeLimits(),
            timeout_s,
            skip_unsupported=skip_unsupported,
        )

    async def end_processes(self) -> None:
        """Kill every process in the sandbox, including background jobs and daemons; files and tools stay.

        For a grader that continues in the agent's own sandbox. The next call in a session starts it again.

        Raises:
            SandboxError, ToolError: our infrastructure failed, or the processes cannot be killed.
        """
        try:
            await self._server.ask(EndProcesses, Done, timeout_s=self.limits.transfer_s)
        except OSError as error:
            raise ToolError(f"the sandbox's processes cannot be ended: {error}") from error

    def _noted(self, result: ToolResult) -> ToolResult:
        return with_notices(result, self.sandbox.pop_notices())

    async def checkpoint(self) -> Checkpoint:
        """Save the state of the sandbox and its sessions, between two calls: see `CheckpointingSandbox`.

        Raises:
            UnsupportedMachine: the driver takes no checkpoints.
            SandboxError, ToolError: our infrastructure failed.
        """
        if not isinstance(self.sandbox, CheckpointingSandbox):
            raise UnsupportedMachine("this sandbox takes no checkpoints", hint="use the driver bubblewrap")
        async with contextlib.AsyncExitStack() as quiet:
            await quiet.enter_async_context(self._server.quiet())
            shells, python = (await self._server.sessions()).shells, None
            if self._forked is not None:
                await quiet.enter_async_context(self._forked.quiet())
                python = (await self._forked.sessions()).python
            saved = {name: await self._save_shell(name) for name in shells}
            checkpoint = await self.sandbox.checkpoint(shells=tuple(shells.values()), python=python)
        checkpoint.shells = {
            name: (shell.state, shell.status) for name, shell in saved.items() if shell.status is not None
        }
        checkpoint.lost += tuple(
            f"the state of the shell {name!r}, in which a program waits for input"
            for name in sorted(saved.keys() - checkpoint.shells.keys())
        )
        if self._kernel is not None:
            checkpoint.lost += ("the variables of the Jupyter kernel",)
        return checkpoint

    async def _save_shell(self, name: str) -> SavedShell:
        timeout_s = self.limits.transfer_s
        return await self._server.ask(lambda id_: SaveShell(id_, name), SavedShell, timeout_s=timeout_s)

    async def _restore_shell(self, name: str, state: bytes, status: int) -> None:
        timeout_s = self.limits.transfer_s
        await self._server.ask(lambda id_: RestoreShell(id_, name, state, status), Done, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Stop the tool servers, and with them the shells and the Python session. Idempotent."""
        for part in (self._server, self._forked, self._kernel):
            if part is not None:
                await part.aclose()

    async def _edit(self, make: Callable[[int], Request]) -> ToolResult:
        started = time.monotonic()
        try:
            edited = await self._server.ask(make, Edited, timeout_s=self.limits.transfer_s)
        except ServerLost as error:
            return self._noted(server_lost(error.message, "editor", time.monotonic() - started))
        return self._noted(
            ToolResult(
                text=edited.text,
                ok=edited.ok,
                duration_s=time.monotonic() - started,
                truncated_bytes=edited.omitted,
            )
        )


def _check_timeout(timeout_s: float) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(f"timeout_s is {timeout_s}; it must be a positive number of seconds")
