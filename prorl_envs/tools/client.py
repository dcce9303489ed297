"""The host's side of a sandbox's tools."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from prorl_envs.errors import InputError, SandboxError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.arguments import complaint, is_unicode
from prorl_envs.tools.connection import Connection, ServerLost
from prorl_envs.tools.schemas import BASH, EDITOR, PYTHON
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult
from prorl_envs.tools.wire import (
    CONTENT_LIMIT,
    Bash,
    BashDone,
    Content,
    Done,
    Edit,
    Edited,
    Python,
    PythonDone,
    Read,
    Reply,
    Request,
    Run,
    RunDone,
    Setup,
    Write,
)

ENTRY = "prorl_envs.tools.server:serve"
#: Variables of every tool's processes, unless the sandbox's own say otherwise: nobody presses a pager's key,
#: and the model reads no colours.
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb"}


class PythonEngine(StrEnum):
    """What runs Python cells.

    NONE: nothing does. FORKED: IPython in a process forked warm from the host's own interpreter.
    """

    NONE = "none"
    FORKED = "forked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """The bounds of one toolbox.

    Args:
        output_bytes: bytes of output kept of each tool call; half from its beginning, half from its end.
        grace_s: seconds a command has to obey an interrupt before it is killed.
        margin_s: seconds beyond a call's own timeout after which the tool server itself is given up.
        transfer_s: seconds for moving a file.
    """

    output_bytes: int = 32 * 1024
    grace_s: float = 2.0
    margin_s: float = 15.0
    transfer_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A fresh process that has ended.

    Args:
        exit_code: its status, negative for a signal; None where it ran past its deadline.
        output: stdout and stderr as they came, bounded.
        timed_out: whether the deadline ended it.
        truncated_bytes: how much is missing from the middle of `output`.
        duration_s: seconds it ran, measured beside it.
    """

    exit_code: int | None
    output: bytes
    timed_out: bool
    truncated_bytes: int
    duration_s: float


@dataclass(slots=True)
class _Session:
    """Keeps the calls of one session in order.

    Args:
        server: the connection it last used; None where there was none, or the model knows of its loss.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    server: Connection | None = None


class _Link:
    """A tool server that is forked at first use and again whenever it is found lost."""

    def __init__(self, sandbox: Sandbox, template: str, limits: ToolLimits, *, python: bool) -> None:
        self._sandbox = sandbox
        self._template = template
        self._limits = limits
        self._python = python
        self._connection: Connection | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def connection(self) -> Connection:
        """The live connection.

        Raises:
            SandboxError: the sandbox has ended.
            ToolError: the toolbox is closed, or a new server cannot be set up.
        """
        connection = self._connection
        if connection is not None and not connection.lost:
            return connection
        if self._closed:
            raise ToolError("the toolbox is closed")
        if not self._sandbox.alive:
            raise SandboxError(f"sandbox {self._sandbox.id} has ended")
        async with self._starting:
            if self._connection is None or self._connection.lost:
                self._connection = await self._start()
            return self._connection

    async def aclose(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.aclose()

    async def _start(self) -> Connection:
        sock = await self._sandbox.spawn(ENTRY, template=self._template)
        try:
            connection = await Connection.open(sock)
        except BaseException:
            sock.close()
            raise
        limits = self._limits

        def setup(request_id: int) -> Setup:
            return Setup(
                request_id,
                self._sandbox.spec.workdir,
                {**ENVIRONMENT, **self._sandbox.spec.env},
                limits.output_bytes,
                limits.grace_s,
                self._python,
            )

        try:
            await connection.request(setup, Done, deadline_s=limits.margin_s)
        except BaseException:
            await connection.aclose()
            raise
        return connection


class Toolbox:
    """The tools of one sandbox. Made by `open`; closed by whoever opened it, before the sandbox.

    Calls of different kinds and sessions may be in flight together; those of one session run in order.
    Cancelling a call stops what it started and leaves the toolbox usable.
    """

    def __init__(self, sandbox: Sandbox, python: PythonEngine, limits: ToolLimits) -> None:
        self.sandbox = sandbox
        self.limits = limits
        self._tools = _Link(sandbox, "base", limits, python=False)
        self._shells: dict[str, _Session] = {}
        # A server of its own: a session's memory is a copy of its server's, which must hold nothing else.
        self._python = (
            _Link(sandbox, "ipython", limits, python=True) if python is PythonEngine.FORKED else None
        )
        self._cells = _Session()

    @classmethod
    async def open(
        cls, sandbox: Sandbox, *, python: PythonEngine | bool = False, limits: ToolLimits | None = None
    ) -> Self:
        """Fork the tool servers into a running sandbox.

        Args:
            sandbox: stays its owner's.
            python: what runs Python cells; True takes the forked session.
            limits: bounds of outputs and times.

        Raises:
            SandboxError: the sandbox has ended or cannot be joined.
            ToolError: a server does not answer.
        """
        engine = PythonEngine.FORKED if python is True else PythonEngine(python or PythonEngine.NONE)
        toolbox = cls(sandbox, engine, limits or ToolLimits())
        try:
            await toolbox._tools.connection()
            if toolbox._python is not None:
                await toolbox._python.connection()
        except BaseException:
            await toolbox.aclose()
            raise
        return toolbox

    async def bash(self, command: str, *, timeout_s: float, session: str = "main") -> ToolResult:
        """Run a command in a persistent shell.

        Args:
            command: any text bash can evaluate.
            timeout_s: seconds after which it is interrupted, then killed.
            session: which shell; made at first use.

        Returns:
            The output, then the exit status where it is not 0, then what happened to the command or shell.
            `data`: exit_code (None if stopped), cwd, timed_out.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)
        if "\0" in command or not is_unicode(command):
            return ToolResult(text="the command holds a character that bash cannot take", ok=False)
        started = time.monotonic()
        shell = self._shells.setdefault(session, _Session())
        async with shell.lock:
            connection = await self._tools.connection()
            lost = shell.server is not None and shell.server is not connection
            shell.server = connection
            try:
                done = await self._ask(
                    connection, lambda id_: Bash(id_, session, command, timeout_s), BashDone, timeout_s
                )
            except ServerLost as error:
                shell.server = None
                return _server_lost(error, "shell", time.monotonic() - started)
            except OSError as error:
                raise ToolError(f"no shell could be started: {error}") from error
        if done.notice and not self.sandbox.alive:
            raise SandboxError(f"sandbox {self.sandbox.id} ended during a command")
        return _bash_result(done, "shell" if lost else "", time.monotonic() - started)

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
        _check_timeout(timeout_s)
        if self._python is None:
            raise InputError("this toolbox has no Python session", hint="open it with python=True")
        if not is_unicode(code):
            return ToolResult(text="the code holds a character that Python cannot take", ok=False)
        started = time.monotonic()
        async with self._cells.lock:
            connection = await self._python.connection()
            lost = self._cells.server is not None and self._cells.server is not connection
            self._cells.server = connection
            try:
                done = await self._ask(
                    connection, lambda id_: Python(id_, code, timeout_s), PythonDone, timeout_s
                )
            except ServerLost as error:
                self._cells.server = None
                return _server_lost(error, "Python session", time.monotonic() - started)
            except OSError as error:
                raise ToolError(f"no Python session could be started: {error}") from error
        if done.notice and not self.sandbox.alive:
            raise SandboxError(f"sandbox {self.sandbox.id} ended during a cell")
        return _python_result(done, "Python session" if lost else "", time.monotonic() - started)

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
        started = time.monotonic()
        connection = await self._tools.connection()
        try:
            edited = await self._ask(
                connection, lambda id_: Edit(id_, **arguments), Edited, self.limits.transfer_s
            )
        except ServerLost as error:
            return _server_lost(error, "editor", time.monotonic() - started)
        return ToolResult(
            text=edited.text,
            ok=edited.ok,
            duration_s=time.monotonic() - started,
            truncated_bytes=edited.omitted,
        )

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
                    return await self.bash(call.arguments["command"], timeout_s=timeout_s)
            case name if name == PYTHON.name and self._python is not None:
                wrong = complaint(PYTHON, call.arguments)
                if not wrong:
                    return await self.python(call.arguments["code"], timeout_s=timeout_s)
            case EDITOR.name:
                return await self.edit(call.arguments)
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
    ) -> Completed:
        """Run a fresh process; its process group is killed when it ends or at the deadline.

        Args:
            argv: program and arguments.
            cwd: absolute directory; empty means the sandbox's workspace.
            env: variables on top of the sandbox's own.
            stdin: what it reads; empty means the null device.
            timeout_s: seconds after which it is killed.
            output_limit: bytes of output kept.

        Raises:
            OSError: as starting it locally would raise (no such program, no such directory).
            SandboxError, ToolError: our infrastructure failed.
        """
        _check_timeout(timeout_s)

        def make(id_: int) -> Run:
            return Run(id_, list(argv), cwd, dict(env or {}), stdin, timeout_s, output_limit)

        done = await self._ask(await self._tools.connection(), make, RunDone, timeout_s)
        return Completed(
            exit_code=done.exit_code,
            output=done.output,
            timed_out=done.timed_out,
            truncated_bytes=done.omitted,
            duration_s=done.duration_s,
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
                f"{len(data)} bytes are more than one transfer takes", hint="split it, or use a mount"
            )
        await self._ask(
            await self._tools.connection(),
            lambda id_: Write(id_, path, data, mode),
            Done,
            self.limits.transfer_s,
        )

    async def read(self, path: str, *, limit: int = CONTENT_LIMIT) -> bytes:
        """The first `limit` bytes of a regular file. Content is hostile.

        Raises:
            OSError: as a local read would raise; also for what is no regular file.
            SandboxError, ToolError: our infrastructure failed.
        """
        content = await self._ask(
            await self._tools.connection(),
            lambda id_: Read(id_, path, limit),
            Content,
            self.limits.transfer_s,
        )
        return content.data

    async def aclose(self) -> None:
        """End the tool servers, and with them the shells and the Python session. Idempotent."""
        await self._tools.aclose()
        if self._python is not None:
            await self._python.aclose()

    async def _ask[R: Reply](
        self, connection: Connection, make: Callable[[int], Request], reply_type: type[R], timeout_s: float
    ) -> R:
        try:
            return await connection.request(make, reply_type, deadline_s=timeout_s + self.limits.margin_s)
        except (ServerLost, OSError) as error:
            if not self.sandbox.alive:
                raise SandboxError(f"sandbox {self.sandbox.id} has ended") from error
            raise


def _check_timeout(timeout_s: float) -> None:
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(f"timeout_s is {timeout_s}; it must be a positive number of seconds")


def _server_lost(error: ServerLost, what: str, duration_s: float) -> ToolResult:
    text = f"[{error.message}; the next call gets a new {what}, and what this one held is lost]"
    return ToolResult(text=text, ok=False, data={"tool_server_lost": True}, duration_s=duration_s)


def _bash_result(done: BashDone, renewed: str, duration_s: float) -> ToolResult:
    status = f"[exit status {done.exit_code}]" if done.exit_code else ""
    return ToolResult(
        text=_observation(renewed, done.output, status, done.notice),
        ok=done.exit_code is not None,
        data={"exit_code": done.exit_code, "cwd": done.cwd, "timed_out": done.timed_out},
        duration_s=duration_s,
        truncated_bytes=done.omitted,
    )


def _python_result(done: PythonDone, renewed: str, duration_s: float) -> ToolResult:
    data: JsonObject = {"error": done.error or None, "timed_out": done.timed_out}
    if done.display:
        data["display"] = done.display
    return ToolResult(
        text=_observation(renewed, done.output, done.notice),
        # A traceback is an answer; a session that was stopped or ended is not.
        ok=not done.notice,
        data=data,
        duration_s=duration_s,
        truncated_bytes=done.omitted,
    )


def _observation(renewed: str, output: str, *remarks: str) -> str:
    """The output as it is, or with remarks on lines of their own around it."""
    before = f"[the tool server was lost; this is a new {renewed}]" if renewed else ""
    if not before and not any(remarks):
        return output
    return "\n".join(filter(None, [before, output.removesuffix("\n"), *remarks]))
