"""Interactive program of a sandbox: a separate process, forked from the template like a tool server.

It moves bytes between the program's terminal (or pipes) and the host's socket. If the host does not read, the
program waits. When the host closes the socket, the program and its process group are killed.
"""

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import termios
from functools import partial

from prorl_envs.tools.protocol.messages import Framer, encode
from prorl_envs.tools.protocol.terminal import (
    OUTPUT_SIZE,
    Exited,
    Input,
    Open,
    Output,
    Resize,
    SendSignal,
    decode_to_session,
)
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.process import start_process

_RECEIVE_SIZE = 65536
#: Bytes of input queued for a program that does not read; above this limit the program is killed.
_INPUT_LIMIT = 64 * 1024 * 1024
#: Maximum reads to empty a terminal or pipe to which programs may still write.
_DRAIN_READS = 300


def serve(sock: socket.socket) -> None:
    """Run one session. Entry point of a process that a template forks.

    Args:
        sock: connected stream socket; its peer is the host.

    Raises:
        WireError: the host broke the protocol.
    """
    session = _Session(sock)
    try:
        session.run()
    finally:
        session.close()


class _Session:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        # A separate descriptor for sending, because the loop watches each descriptor for one event.
        self._sending = sock.dup()
        self._loop = EventLoop()
        self._framer = Framer()
        self._unsent = bytearray()
        self._input = bytearray()
        self._program: _Program | None = None
        self._ended = False

    def run(self) -> None:
        self._loop.watch(self._sock.fileno(), self._on_request)
        self._loop.run()

    def close(self) -> None:
        if self._program is not None:
            self._program.close()
        self._sending.close()
        self._sock.close()

    # Messages from the host.

    def _on_request(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_SIZE)
        except ConnectionResetError:
            data = b""
        if not data:
            self._loop.stop()
            return
        for frame in self._framer.feed(data):
            match decode_to_session(frame):
                case Open() as request:
                    self._open(request)
                case Input(data) if self._program is not None and not self._ended:
                    self._input += data
                    self._on_writable()
                case Resize(rows, columns) if self._program is not None:
                    self._program.resize(rows, columns)
                case SendSignal(name) if self._program is not None:
                    self._program.signal(signal.Signals[name])
                case _:  # before the start, or after the exit
                    pass

    def _open(self, request: Open) -> None:
        try:
            self._program = _Program(request)
        except OSError as error:
            self._end(Exited(-1, error.strerror or str(error)))
            return
        self._watch_outputs()
        self._loop.watch(self._program.pidfd, self._on_exit)

    # Input to the program.

    def _on_writable(self) -> None:
        assert self._program is not None
        self._loop.forget(self._program.input)
        try:
            written = os.write(self._program.input, self._input)
        except BlockingIOError:
            written = 0
        except OSError:  # the program no longer reads
            written = len(self._input)
        del self._input[:written]
        if len(self._input) > _INPUT_LIMIT:
            self._program.signal(signal.SIGKILL)
        elif self._input:
            self._loop.watch(self._program.input, self._on_writable, write=True)

    # Output of the program.

    def _watch_outputs(self) -> None:
        assert self._program is not None
        for fd in self._program.outputs:
            self._loop.watch(fd, partial(self._forward, fd))

    def _forward(self, fd: int) -> bool:
        """Forward the output available now; return True if more may follow."""
        assert self._program is not None
        try:
            data = os.read(fd, OUTPUT_SIZE)
        except BlockingIOError:
            return False
        except OSError:  # EIO: a terminal's last user has closed it
            data = b""
        if data:
            self._send(Output(data, fd == self._program.errors))
        else:
            self._loop.forget(fd)
            self._program.outputs.discard(fd)
        return bool(data)

    def _on_exit(self) -> None:
        assert self._program is not None
        status = self._program.reap()
        for fd in tuple(self._program.outputs):
            self._loop.forget(fd)
            for _ in range(_DRAIN_READS):
                if not self._forward(fd):
                    break
        self._loop.forget(self._program.pidfd)
        self._loop.forget(self._program.input)
        self._end(Exited(status, ""))

    # Messages to the host.

    def _end(self, exited: Exited) -> None:
        self._ended = True
        self._send(exited)

    def _send(self, message: Output | Exited) -> None:
        self._unsent += encode(message)
        self._flush()

    def _flush(self) -> None:
        self._loop.forget(self._sending.fileno())
        try:
            del self._unsent[: self._sending.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._loop.stop()
            return
        if self._unsent:
            if self._program is not None and not self._ended:
                for fd in self._program.outputs:
                    self._loop.forget(fd)
            self._loop.watch(self._sending.fileno(), self._on_drained, write=True)

    def _on_drained(self) -> None:
        self._flush()
        if not self._unsent and self._program is not None and not self._ended:
            self._watch_outputs()


class _Program:
    """Program and its descriptors. Raises OSError if the program cannot be started."""

    def __init__(self, request: Open) -> None:
        self._terminal = request.terminal
        self.errors = -1
        self._process, self.input, self.outputs = (
            self._on_terminal(request) if request.terminal else self._on_pipes(request)
        )
        self.pidfd = os.pidfd_open(self._process.pid)
        self._fds = {self.input, self.pidfd, *self.outputs}
        for fd in (self.input, *self.outputs):
            os.set_blocking(fd, False)

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size, which notifies the programs on it."""
        if self._terminal:
            _set_size(self.input, rows, columns)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program's group and, on a terminal, to the foreground group."""
        groups = {self._process.pid}
        if self._terminal:
            with contextlib.suppress(OSError):
                groups.add(os.tcgetpgrp(self.input))
        for group in groups:
            # The terminal's foreground group may have exited, and its number may have been reused.
            with contextlib.suppress(ProcessLookupError):
                if self._process.returncode is None and os.getsid(group) == self._process.pid:
                    os.killpg(group, number)

    def reap(self) -> int:
        """Return the exit status of the program."""
        return self._process.wait()

    def close(self) -> None:
        """Kill the program with its groups, and close all descriptors."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for fd in self._fds:
            os.close(fd)

    def _on_terminal(self, request: Open) -> tuple[subprocess.Popen[bytes], int, set[int]]:
        ours, theirs = pty.openpty()
        try:
            _set_size(ours, request.rows, request.columns)
            process = start_process(request, theirs, theirs, theirs, _take_terminal)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return process, os.dup(ours), {ours}  # the loop watches each descriptor for one event

    def _on_pipes(self, request: Open) -> tuple[subprocess.Popen[bytes], int, set[int]]:
        pairs = [os.pipe() for _ in range(3)]
        (stdin, ours_in), (ours_out, stdout), (ours_err, stderr) = pairs
        try:
            process = start_process(request, stdin, stdout, stderr)
        except BaseException:
            for fd in (ours_in, ours_out, ours_err):
                os.close(fd)
            raise
        finally:
            for fd in (stdin, stdout, stderr):
                os.close(fd)
        self.errors = ours_err
        return process, ours_in, {ours_out, ours_err}


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _set_size(fd: int, rows: int, columns: int) -> None:
    size = struct.pack("HHHH", *(min(max(value, 1), 0xFFFF) for value in (rows, columns)), 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)
