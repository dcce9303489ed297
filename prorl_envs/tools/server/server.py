"""Tool server: one small process per sandbox that answers the host's requests.

It is forked warm from a template, and runs inside the sandbox's namespaces except the pid namespace: it may
have children there, but no threads. When the host closes its end of the socket, the server kills its children
and exits.
"""

import contextlib
import os
import socket

import msgspec

from prorl_envs.tools.protocol.messages import (
    CONTENT_LIMIT,
    AnyRequest,
    Bash,
    BashDone,
    Cancel,
    Content,
    Done,
    Edit,
    Edited,
    EndProcesses,
    Framer,
    ListSessions,
    Patch,
    Python,
    Read,
    Reply,
    RestoreShell,
    Run,
    RunDone,
    SavedShell,
    SaveShell,
    SessionPids,
    Setup,
    ToolRefused,
    Write,
    decode_request,
    encode,
)
from prorl_envs.tools.protocol.output import clip
from prorl_envs.tools.server.files.editor import Editor
from prorl_envs.tools.server.files.patch_files import apply_patch
from prorl_envs.tools.server.files.text import EditError
from prorl_envs.tools.server.files.undo import UndoHistory
from prorl_envs.tools.server.files.whole_files import read_file, write_file
from prorl_envs.tools.server.fork import end_processes
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.process import FreshProcess
from prorl_envs.tools.server.python_session import KernelSession
from prorl_envs.tools.server.reader import Leftovers
from prorl_envs.tools.server.shell import ShellSession
from prorl_envs.tools.server.shell_state import restore_command, restore_script, save_command

#: Maximum shell sessions of one sandbox.
SESSION_LIMIT = 16
_RECEIVE_SIZE = 32768
_REHEARSAL_S = 10.0
#: Timeout of saving or restoring the state of a shell, in seconds.
_STATE_S = 60.0


def serve(sock: socket.socket, memory: int | None = None) -> None:
    """Answer requests until the peer closes the socket. Entry point of a process that a template forks.

    Args:
        sock: connected stream socket; its peer is the host.
        memory: descriptor of the memory that the first Python session is to get.

    Raises:
        WireError: the host broke the protocol.
    """
    sock.setblocking(True)
    server = ToolServer(sock, memory)
    try:
        server.run()
    finally:
        server.close()


def rehearse() -> None:
    """Serve a few requests in the template itself, before it forks.

    The interpreter specialises code during its first runs, which modifies memory. If this is done once in the
    template, all forks share the result: they start faster and use a tenth less memory.
    """
    sock, host_end = socket.socketpair()
    with host_end:
        server = ToolServer(sock)
        requests = [
            Setup(1, "/", {}, 32768, 2.0, False),
            *(Bash(number, "main", ":", _REHEARSAL_S) for number in range(2, 6)),
        ]
        for request in requests:
            host_end.sendall(encode(request))
        server.run_until(host_end, replies=len(requests))
        server.close()


class ToolServer:
    """Dispatcher of requests; each request is answered when it is done."""

    def __init__(self, sock: socket.socket, memory: int | None = None) -> None:
        self._sock = sock
        self._memory = memory
        self._loop = EventLoop()
        self._framer = Framer()
        self._setup = Setup(0, "/", {}, 32768, 2.0, False)
        self._history = UndoHistory()
        self._shells: dict[str, ShellSession] = {}
        self._kernel: KernelSession | None = None
        self._processes: dict[int, FreshProcess] = {}
        self._leftovers = Leftovers(self._loop)

    def run(self) -> None:
        self._loop.watch(self._sock.fileno(), self._on_request)
        self._loop.run()

    def run_until(self, host: socket.socket, *, replies: int) -> None:
        """Run until the given number of replies can be read at the host's end."""
        framer, missing = Framer(), replies

        def on_reply() -> None:
            nonlocal missing
            missing -= len(framer.feed(host.recv(_RECEIVE_SIZE)))
            if missing <= 0:
                self._loop.stop()

        self._loop.watch(host.fileno(), on_reply)
        self.run()

    def close(self) -> None:
        for shell in self._shells.values():
            shell.close()
        if self._kernel is not None:
            self._kernel.close()
        for process in self._processes.values():
            process.close()
        self._leftovers.close()
        self._sock.close()

    def _on_request(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_SIZE)
        except ConnectionResetError:
            data = b""
        if not data:
            self._loop.stop()
            return
        for frame in self._framer.feed(data):
            request = decode_request(frame)
            try:
                self._dispatch(request)
            except OSError as error:
                self._refuse(request.id, error)

    def _refuse(self, request_id: int, error: OSError) -> None:
        self._answer(ToolRefused(request_id, error.errno or 0, error.strerror or str(error)))

    def _answer(self, reply: Reply) -> None:
        # Blocking, because the host always reads. If it does not, the commands' output waits too.
        try:
            self._sock.sendall(encode(reply))
        except (BrokenPipeError, ConnectionResetError):
            self._loop.stop()

    def _dispatch(self, request: AnyRequest) -> None:
        match request:
            case Bash():
                self._bash(request)
            case Python():
                self._python().submit(request, self._answer)
            case Run():
                self._run(request)
            case Read():
                data, _ = read_file(request.path, min(request.limit, CONTENT_LIMIT))
                self._answer(Content(request.id, data))
            case Write():
                write_file(request.path, request.data, mode=request.mode)
                self._answer(Done(request.id))
            case Edit() | Patch():
                self._edit(request)
            case EndProcesses():
                end_processes()
                self._answer(Done(request.id))
            case SaveShell():
                self._save_shell(request)
            case RestoreShell():
                self._restore_shell(request)
            case ListSessions():
                self._answer(self._session_pids(request.id))
            case Cancel():
                self._cancel(request.id)
            case Setup():
                # The actual start directory: with the local driver, the requested directory does not exist.
                self._setup = msgspec.structs.replace(request, workdir=os.getcwd())  # noqa: PTH109
                # Environment of all later processes, including the Python session's fork.
                os.environ.update(request.env)
                if request.python:
                    self._python().start()
                self._answer(Done(request.id))

    def _bash(self, request: Bash) -> None:
        name = request.session
        if name not in self._shells:
            if len(self._shells) >= SESSION_LIMIT:
                notice = f"[not run: {SESSION_LIMIT} sessions are open already; use one of them]"
                self._answer(BashDone(request.id, "", 0, None, "", False, notice, False, True))
                return
            self._shells[name] = ShellSession(self._loop, self._setup)
        self._shells[name].submit(request, self._answer)

    def _save_shell(self, request: SaveShell) -> None:
        path = f"/tmp/.state-{os.urandom(8).hex()}"

        def saved(reply: Reply) -> None:
            if isinstance(reply, ToolRefused):
                self._answer(reply)
                return
            assert isinstance(reply, BashDone)
            if reply.exit_code is None:
                self._answer(SavedShell(request.id, b"", None))
                return
            try:
                state, _ = read_file(path, CONTENT_LIMIT)
                os.unlink(path)  # noqa: PTH108 - this process does not import pathlib
            except OSError as error:  # a program of the sandbox has removed it
                self._refuse(request.id, error)
            else:
                self._answer(SavedShell(request.id, state, reply.exit_code))

        command = Bash(request.id, request.session, save_command(path), _STATE_S)
        self._shells[request.session].submit(command, saved)

    def _restore_shell(self, request: RestoreShell) -> None:
        path = f"/tmp/.state-{os.urandom(8).hex()}"
        # The shell is started with these.
        script = restore_script(request.state, (*os.environ, "PS1", "PS2"))
        write_file(path, script, mode=0o600)

        def restored(reply: Reply) -> None:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            self._answer(reply if isinstance(reply, ToolRefused) else Done(request.id))

        shell = self._shells[request.session] = ShellSession(self._loop, self._setup)
        command = restore_command(path, request.status)
        shell.submit(Bash(request.id, request.session, command, _STATE_S), restored)

    def _python(self) -> KernelSession:
        if self._kernel is None:
            self._kernel = KernelSession(self._loop, self._setup, self._memory)
        return self._kernel

    def _session_pids(self, request_id: int) -> SessionPids:
        processes = {name: shell.process for name, shell in self._shells.items()}
        kernel = None if self._kernel is None else self._kernel.process
        shells = {name: process.pid for name, process in processes.items() if process is not None}
        return SessionPids(request_id, shells, None if kernel is None else kernel.pid)

    def _run(self, request: Run) -> None:
        def ended(reply: RunDone) -> None:
            del self._processes[request.id]
            self._answer(reply)

        request = msgspec.structs.replace(request, cwd=request.cwd or self._setup.workdir)
        self._processes[request.id] = FreshProcess(
            self._loop, request, leftovers=self._leftovers, answer=ended
        )

    def _edit(self, request: Edit | Patch) -> None:
        limit, ok = self._setup.output_limit, True
        try:
            if isinstance(request, Edit):
                text = Editor(self._history).edit(request)
            else:
                text = apply_patch(request.patch, self._setup.workdir, self._history)
        except EditError as error:
            text, ok = str(error), False
        text, omitted = clip(text, limit)
        self._answer(Edited(request.id, text, ok, omitted))

    def _cancel(self, request_id: int) -> None:
        for shell in self._shells.values():
            shell.cancel(request_id)
        if self._kernel is not None:
            self._kernel.cancel(request_id)
        if request_id in self._processes:
            self._processes[request_id].cancel()
