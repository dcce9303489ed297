"""The host's side of a sandbox's tools."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from prorl_envs.errors import InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools import tree_client
from prorl_envs.tools.arguments import complaint, is_unicode
from prorl_envs.tools.connection import ServerLost
from prorl_envs.tools.link import ServerLink, Session, ToolLimits, check_timeout
from prorl_envs.tools.python import ForkedPython, PythonEngine, PythonTool
from prorl_envs.tools.results import bash_result, server_lost, with_notices
from prorl_envs.tools.schemas import APPLY_PATCH, BASH, EDITOR, PYTHON
from prorl_envs.tools.tree import Transferred, TreeLimits
from prorl_envs.tools.types import Completed, JsonObject, ToolCall, ToolResult
from prorl_envs.tools.wire import (
    CONTENT_LIMIT,
    Bash,
    BashDone,
    Content,
    Done,
    Edit,
    Edited,
    EndProcesses,
    Patch,
    Read,
    Request,
    Run,
    RunDone,
    Write,
)

#: Characters of the longest name of a shell session.
SESSION_NAME_LIMIT = 64


class Toolbox:
    """The tools of one sandbox. Made by `open`; closed by whoever opened it, before the sandbox.

    Calls of different kinds and sessions may be in flight together; those of one session run in order.
    Cancelling a call stops what it started and leaves the toolbox usable.
    """

    def __init__(
        self, sandbox: Sandbox, python: PythonEngine, limits: ToolLimits, interpreter: str = "python3"
    ) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._tools = ServerLink(sandbox, "base", limits, python=False)
        self._shells: dict[str, Session] = {}
        self._python: PythonTool | None = None
        if python is PythonEngine.FORKED:
            self._python = ForkedPython(sandbox, limits)
        elif python is PythonEngine.KERNEL:
            # Only here: the libraries behind it take 0.2 s to import.
            from prorl_envs.tools.jupyter import JupyterPython

            self._python = JupyterPython(sandbox, limits, interpreter=interpreter)

    @classmethod
    async def open(
        cls,
        sandbox: Sandbox,
        *,
        python: PythonEngine | bool = False,
        limits: ToolLimits | None = None,
        interpreter: str = "python3",
    ) -> Self:
        """Take a running sandbox. The Python session begins now, where there is to be one; a tool server, or
        the shell, with the first call.

        Args:
            sandbox: stays its owner's.
            python: what runs Python cells; True takes the forked session.
            limits: bounds of outputs and times.
            interpreter: for a Jupyter kernel, the image's Python: a name in its PATH, or an absolute path.

        Raises:
            SandboxError: the sandbox has ended or cannot be joined.
            ToolError: a server does not answer.
        """
        engine = PythonEngine.FORKED if python is True else PythonEngine(python or PythonEngine.NONE)
        toolbox = cls(sandbox, engine, limits or ToolLimits(), interpreter)
        try:
            if toolbox._python is not None:
                await toolbox._python.start()
            else:
                await toolbox._tools.connection()
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
        """Run a command in a persistent shell; or, if one waits there for input, type into it.

        Args:
            command: any text bash can evaluate. Where it is input, it is typed with an Enter at its end;
                names of keys (`C-c`, `C-d`, others in `keys.KEYS`) are typed without, and an empty one waits
                for more output.
            timeout_s: seconds after which it is interrupted, then killed.
            session: which shell; made at first use.
            is_input: whether the text is for a command that waits.
            restart: end the session's shell, and all in it but background jobs, first.

        Returns:
            The output, then the exit status where it is not 0, then what happened to the command or shell. It
            comes early, with `waiting` true, where the command waits for input; `tools/foreground.py` says
            what is taken for waiting.
            `data`: exit_code (None if stopped or waiting), cwd, timed_out, waiting.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        check_timeout(timeout_s)
        if "\0" in command or not is_unicode(command):
            return ToolResult(text="the command holds a character that bash cannot take", ok=False)
        shell = self._shells.get(session)
        if shell is None:
            if len(session) > SESSION_NAME_LIMIT or not is_unicode(session):
                return ToolResult(
                    text=f"a session's name has at most {SESSION_NAME_LIMIT} characters", ok=False
                )
            shell = self._shells[session] = Session()
        started = time.monotonic()
        async with shell.lock:
            connection = await self._tools.shell_connection(session)
            lost = shell.server is not None and shell.server is not connection
            shell.server = connection
            try:
                done = await self._tools.ask(
                    lambda id_: Bash(id_, session, command, timeout_s, is_input, restart),
                    BashDone,
                    timeout_s=timeout_s,
                    connection=connection,
                )
            except ServerLost as error:
                shell.server = None
                return self._noted(server_lost(error, "shell", time.monotonic() - started))
            except OSError as error:
                raise ToolError(f"no shell could be started: {error}") from error
        if done.notice and not self.sandbox.alive:
            raise self.sandbox.ended()
        return self._noted(bash_result(done, "shell" if lost else "", time.monotonic() - started))

    async def python(self, code: str, *, timeout_s: float) -> ToolResult:
        """Run a cell in the persistent Python session.

        Args:
            code: Python, with IPython's magics.
            timeout_s: seconds after which it is interrupted, then killed with the session.

        Returns:
            What the cell printed, the value of a last expression, the traceback, in order; then what happened
            to the session. `data`: error (class name or None), timed_out, display (bundles of MIME type and
            content, where there are any).

        Raises:
            InputError: this toolbox has no Python session.
            SandboxError, ToolError: our infrastructure failed.
        """
        check_timeout(timeout_s)
        if self._python is None:
            raise InputError("this toolbox has no Python session", hint="open it with python=True")
        if not is_unicode(code):
            return ToolResult(text="the code holds a character that Python cannot take", ok=False)
        return self._noted(await self._python.run(code, timeout_s=timeout_s))

    async def restart_python(self) -> None:
        """Give the Python session up for a new one; a cell under way ends, and says so.

        Raises:
            InputError: this toolbox has no Python session.
            SandboxError, ToolError: our infrastructure failed.
        """
        if self._python is None:
            raise InputError("this toolbox has no Python session", hint="open it with python=True")
        await self._python.restart()

    def jupyter_connection_file(self) -> Path:
        """The connection file of the Jupyter kernel, for a Jupyter client of this user to attach with.

        It goes when the kernel goes. What the client is sent is as hostile as the cells that send it.

        Raises:
            InputError: this toolbox has no Jupyter kernel, or none runs.
        """
        if self._python is None or not (path := self._python.connection_file()):
            raise InputError("this toolbox has no Jupyter kernel", hint="open it with PythonEngine.KERNEL")
        return path

    async def edit(self, arguments: JsonObject) -> ToolResult:
        """View or edit a file.

        Args:
            arguments: as `schemas.EDITOR` describes them; hostile.

        Returns:
            `ok=False` with a message for the model where the arguments are wrong or the edit does not apply.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        if wrong := complaint(EDITOR, arguments):
            return ToolResult(text=wrong, ok=False)
        return await self._edit(lambda id_: Edit(id_, **arguments))

    async def patch(self, arguments: JsonObject) -> ToolResult:
        """Apply a patch to files: all of it, or nothing.

        Args:
            arguments: as `schemas.APPLY_PATCH` describes them; hostile.

        Returns:
            `ok=False` with a message for the model where the patch does not apply.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        if wrong := complaint(APPLY_PATCH, arguments):
            return ToolResult(text=wrong, ok=False)
        return await self._edit(lambda id_: Patch(id_, arguments["input"]))

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Carry out a model's call of a built-in tool.

        Args:
            call: hostile in every part.
            timeout_s: seconds it may take.

        Returns:
            `ok=False` with a message for the model where the tool or its arguments are wrong.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        match call.name:
            case BASH.name:
                wrong = complaint(BASH, call.arguments)
                if not wrong:
                    return await self.bash(**call.arguments, timeout_s=timeout_s)
            case name if name == PYTHON.name and self._python is not None:
                wrong = complaint(PYTHON, call.arguments)
                if not wrong:
                    return await self.python(call.arguments["code"], timeout_s=timeout_s)
            case EDITOR.name:
                return await self.edit(call.arguments)
            case APPLY_PATCH.name:
                return await self.patch(call.arguments)
            case _:
                wrong = f"there is no tool {call.name[:50]!r}"
        return ToolResult(text=wrong, ok=False)

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
        """Run a fresh process; its process group is killed when it ends or at the deadline.

        Args:
            argv: program and arguments.
            cwd: absolute directory; empty means the sandbox's workspace.
            env: variables on top of the sandbox's own.
            stdin: what it reads; empty means the null device.
            timeout_s: seconds after which it is killed.
            output_limit: bytes kept of the output, or of each of the two where they are apart.
            apart: keep stderr apart from stdout.
            background: what it put into the background goes on after it ended by itself, and what that
                writes is lost.

        Raises:
            OSError: as starting it locally would raise (no such program, no such directory).
            SandboxError, ToolError: our infrastructure failed.
        """
        check_timeout(timeout_s)

        def make(id_: int) -> Run:
            return Run(
                id_, list(argv), cwd, dict(env or {}), stdin, timeout_s, output_limit, apart, background
            )

        done = await self._tools.ask(make, RunDone, timeout_s=timeout_s)
        if done.exit_code is not None and done.exit_code < 0 and not self.sandbox.alive:
            # Its end can reach us before that of its server: it was the sandbox that killed it.
            raise self.sandbox.ended()
        return Completed(
            exit_code=done.exit_code,
            output=done.output,
            timed_out=done.timed_out,
            truncated_bytes=done.omitted,
            duration_s=done.duration_s,
            errors=done.errors,
        )

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file in one step, with the sandbox's own rights; missing folders are made.

        Raises:
            InputError: more than `wire.CONTENT_LIMIT` bytes.
            OSError: as a local write would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        if len(data) > CONTENT_LIMIT:
            raise InputError(
                f"{len(data)} bytes are more than one transfer takes", hint="upload a file, or use a mount"
            )
        await self._tools.ask(
            lambda id_: Write(id_, path, data, mode),
            Done,
            timeout_s=self.limits.transfer_s,
        )

    async def read(self, path: str, *, limit: int = CONTENT_LIMIT) -> bytes:
        """The first `limit` bytes of a regular file. Content is hostile.

        Raises:
            OSError: as a local read would raise; also for what is no regular file.
            SandboxError, ToolError: our infrastructure failed.
        """
        content = await self._tools.ask(
            lambda id_: Read(id_, path, limit),
            Content,
            timeout_s=self.limits.transfer_s,
        )
        return content.data

    async def upload(
        self, source: Path, target: str, *, timeout_s: float, limits: TreeLimits | None = None
    ) -> Transferred:
        """Copy a file or a tree of the host into the sandbox, with the sandbox's own rights.

        A file is created or replaced. A tree is merged into what is there: its files and links are created or
        replaced, each in one step; others stay. No link below `target` is followed. Where it fails, what was
        copied until then stays. `tree.py` says what is carried.

        Args:
            source: path on the host.
            target: absolute path inside; missing folders are made.
            timeout_s: seconds it may take.
            limits: the most that is carried.

        Raises:
            TransferRefused: the tree holds what is not carried, or too much.
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        check_timeout(timeout_s)
        return await tree_client.upload(self.sandbox, source, target, limits or TreeLimits(), timeout_s)

    async def download(
        self,
        source: str,
        target: Path,
        *,
        timeout_s: float,
        limits: TreeLimits | None = None,
        leave_out: bool = False,
    ) -> Transferred:
        """Copy a file or a tree out of the sandbox: all of it, or nothing. Content is hostile.

        What arrives holds no link that leads out of it, no device, pipe or socket, no set-id bit. Whatever
        runs in the sandbox meanwhile may change the tree while it is read.

        Args:
            source: absolute path inside.
            target: path on the host; must not exist, while its parent must.
            timeout_s: seconds it may take.
            limits: the most that is carried.
            leave_out: whether to leave out, and name in the answer, what cannot be carried.

        Raises:
            InputError: `target` exists.
            TransferRefused: the tree holds what is not carried, or too much.
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        check_timeout(timeout_s)
        return await tree_client.download(
            self.sandbox, source, target, limits or TreeLimits(), timeout_s, leave_out=leave_out
        )

    async def end_processes(self) -> None:
        """Kill every process in the sandbox, background jobs and daemons included; files and tools stay.

        For a grader that goes on in the agent's own sandbox. The next call in each session gets a new one.

        Raises:
            SandboxError, ToolError: our infrastructure failed, or the processes cannot be ended.
        """
        try:
            await self._tools.ask(EndProcesses, Done, timeout_s=self.limits.transfer_s)
        except OSError as error:
            raise ToolError(f"the sandbox's processes cannot be ended: {error}") from error

    def _noted(self, result: ToolResult) -> ToolResult:
        return with_notices(result, self.sandbox.take_notices())

    async def aclose(self) -> None:
        """End the tool servers, and with them the shells and the Python session. Idempotent."""
        await self._tools.aclose()
        if self._python is not None:
            await self._python.aclose()

    async def _edit(self, make: Callable[[int], Request]) -> ToolResult:
        started = time.monotonic()
        try:
            edited = await self._tools.ask(make, Edited, timeout_s=self.limits.transfer_s)
        except ServerLost as error:
            return self._noted(server_lost(error, "editor", time.monotonic() - started))
        return self._noted(
            ToolResult(
                text=edited.text,
                ok=edited.ok,
                duration_s=time.monotonic() - started,
                truncated_bytes=edited.omitted,
            )
        )
