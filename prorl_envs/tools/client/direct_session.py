"""Sessions lent to the host, which runs short commands and cells without waking the tool server.

The server keeps the shell, or the Python session, and lends the descriptors that control it: its output, the
channel on which it reports results, and the process. The host then starts a request and reads its result
itself. In every unusual case, the session returns to the server with the output read so far: if a request
takes long, writes much, needs input or must be stopped, if a text cannot be typed, if output arrives while
nothing runs, or if the process exits. So the host only decides when to return it, which costs little time.
"""

import asyncio
import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from prorl_envs.tools.protocol.messages import (
    HEADER_SIZE,
    Bash,
    BashDone,
    Cell,
    Framer,
    Python,
    PythonDone,
    Request,
    Return,
    ReturnPython,
    WireError,
    decode_cell_done,
    encode,
)
from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.protocol.shell_status import Reports
from prorl_envs.tools.server.input_detection import settings
from prorl_envs.tools.server.shell_syntax import BASH

#: Number of descriptors of a loan: output, channel, process.
DESCRIPTORS = 3
#: Seconds after which a running request returns to the server (at the latest after twice this time).
_HOLD_S = 0.02
#: Bytes of output after which the request returns to the server.
_OUTPUT_LIMIT = 16 * 1024
#: Maximum bytes of a cell that runs here, and of its result message.
_CELL_LIMIT = 16 * 1024
_CHANNEL_SIZE, _OUTPUT_SIZE = 8192, 65536
#: Maximum reads to empty an output to which programs may still write.
_DRAIN_READS = 16

type GiveBack = Callable[[Request], None]
type Answer = Callable[[BashDone | PythonDone], None]


class DirectSession[RequestT: Bash | Python](ABC):
    """Session driven by the host. Watches its descriptors in the running loop until `give_back` or `close`.

    Args:
        descriptors: the `DESCRIPTORS` descriptors of the loan, which this object closes.
        output_limit: bytes of output kept of each request.
        give_back: called with the message that returns the session to the server.
        answer: called with the reply to a request.

    Raises:
        OSError, ValueError: a descriptor has the wrong type or is blocking.
    """

    #: Checks of the file types of output and channel.
    _kinds: tuple[Callable[[int], bool], Callable[[int], bool]]

    def __init__(
        self, descriptors: Sequence[int], *, output_limit: int, give_back: GiveBack, answer: Answer
    ) -> None:
        self._output_limit = output_limit
        self._give_back, self._answer = give_back, answer
        self._source, self._channel, self._process = self._descriptors = tuple(descriptors)
        self._running: RequestT | None = None
        self._output = bytearray()
        self._started = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        try:
            for fd, kind in zip((self._source, self._channel), self._kinds, strict=True):
                if not kind(os.fstat(fd).st_mode) or os.get_blocking(fd):
                    raise ValueError(f"descriptor {fd} has a wrong type, or is blocking")
            self._loop.add_reader(self._source, self._on_output)
            self._loop.add_reader(self._channel, self._on_channel)
            self._loop.add_reader(self._process, self.give_back)
        except (OSError, ValueError):
            self.close()
            raise

    def begin(self, request: RequestT) -> bool:
        """Start a request; return False if the session was returned to the server instead."""
        message = self._start_message(request)
        if message is None:
            self.give_back()
            return False
        try:
            self._write(message)
        except OSError:  # the reader is slow or has exited; the server determines the cause
            self.give_back()
            return False
        self._running, self._started = request, self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._started + _HOLD_S, self._on_time)
        return True

    def runs(self, request_id: int) -> bool:
        """Return True if this request runs here."""
        return self._running is not None and self._running.id == request_id

    def give_back(self) -> None:
        """Return the session to the server."""
        self.close()
        self._give_back(self._return_message(self._loop.time() - self._started))

    def close(self) -> None:
        """Stop watching, and close the descriptors."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._descriptors:
            self._loop.remove_reader(fd)
            os.close(fd)

    @abstractmethod
    def _start_message(self, request: RequestT) -> bytes | bytearray | None:
        """Return the message that starts a request; None if the server must run the request."""

    @abstractmethod
    def _write(self, message: bytes | bytearray) -> None:
        """Write the message that starts a request to the session.

        Raises:
            OSError: the message cannot be written at once.
        """

    @abstractmethod
    def _return_message(self, spent_s: float) -> Request:
        """Return the message that returns the session to the server."""

    @abstractmethod
    def _feed(self, data: bytes) -> BashDone | PythonDone | None:
        """Return the reply to the running request, if these bytes of the channel complete it; else None.

        Raises:
            WireError: the bytes are unexpected; the server must handle them.
        """

    def _on_time(self) -> None:
        self._timer = None
        if self._running is None:
            return
        due = self._started + _HOLD_S
        if due <= self._loop.time():
            self.give_back()
        else:
            self._timer = self._loop.call_at(due, self._on_time)

    def _on_output(self) -> None:
        # The result has usually arrived too: reading it now saves a round of the loop.
        if self._running is not None and self._on_channel():
            return
        allowed = 0 if self._running is None else _OUTPUT_LIMIT
        if not self._read_output() or len(self._output) > allowed:
            self.give_back()

    def _read_output(self) -> bool:
        """Read once; return True if more output may follow, now or later."""
        try:
            data = os.read(self._source, _OUTPUT_SIZE)
        except BlockingIOError:  # a terminal may be reported readable without having data
            return True
        except OSError:  # EIO: a terminal's last user has closed it
            return False
        self._output += data
        return bool(data)

    def _on_channel(self) -> bool:
        """Read the channel; return True if the request, or the loan, is finished."""
        try:
            data = os.read(self._channel, _CHANNEL_SIZE)
        except BlockingIOError:  # already read together with the output
            return False
        except ConnectionResetError:
            data = b""
        try:
            done = self._feed(data)
        except WireError:
            self.give_back()
            return True
        if done is None:
            return False
        self._running = None
        self._answer(done)
        return True

    def _text(self) -> tuple[str, int]:
        """Return the output that the finished request wrote, and the number of omitted bytes.

        See `OutputReader.drain`.
        """
        before = -1
        for _ in range(_DRAIN_READS):
            if len(self._output) == before:
                break
            before = len(self._output)
            self._read_output()
        buffer = OutputBuffer(self._output_limit)
        buffer.feed(bytes(self._output))
        self._output.clear()
        captured = buffer.take()
        return captured.text(), captured.omitted


class DirectShell(DirectSession[Bash]):
    """Shell driven by the host. Its output is its terminal; its channel is the pipe for reports.

    Args:
        session: name of the shell's session.
        done: the reply with which the shell was lent.
    """

    _kinds = stat.S_ISCHR, stat.S_ISFIFO

    def __init__(
        self,
        session: str,
        done: BashDone,
        descriptors: Sequence[int],
        *,
        output_limit: int,
        give_back: GiveBack,
        answer: Answer,
    ) -> None:
        self._session = session
        self._status, self._cwd = done.exit_code or 0, done.cwd
        self._settings = done.lent
        self._reports = Reports()
        self._nonce = ""
        super().__init__(descriptors, output_limit=output_limit, give_back=give_back, answer=answer)

    def _start_message(self, request: Bash) -> bytes | None:
        nonce = os.urandom(8).hex()
        line, content = BASH.line(request.command, nonce=nonce, status=self._status)
        # Only the server can store a text that cannot be typed.
        if request.is_input or request.restart or content is not None:
            return None
        if settings(self._source) != self._settings:
            return None
        self._nonce = nonce
        return line

    def _write(self, message: bytes | bytearray) -> None:
        os.write(self._source, message)

    def _return_message(self, spent_s: float) -> Return:
        running = self._running
        return Return(
            0 if running is None else running.id,
            self._session,
            self._status,
            self._cwd,
            running,
            self._nonce,
            spent_s,
            bytes(self._output),
            self._reports.rest,
        )

    def _feed(self, data: bytes) -> BashDone | None:
        report = self._reports.feed(data, self._nonce)
        if not data or self._running is None:
            raise WireError("the shell has exited, or sent an unexpected message")
        if report is None:
            return None
        self._status, self._cwd = report
        text, omitted = self._text()
        return BashDone(self._running.id, text, omitted, self._status, self._cwd, False, "")


class DirectPython(DirectSession[Python]):
    """Python session driven by the host. Its output is a pipe; its channel is the socket for cells.

    The process that runs the model's code writes to this channel. Only short, typed messages are accepted
    here. For any other message, the session returns to the server.
    """

    _kinds = stat.S_ISFIFO, stat.S_ISSOCK

    def __init__(
        self, descriptors: Sequence[int], *, output_limit: int, give_back: GiveBack, answer: Answer
    ) -> None:
        self._received = bytearray()
        super().__init__(descriptors, output_limit=output_limit, give_back=give_back, answer=answer)

    def _start_message(self, request: Python) -> bytearray | None:
        if len(request.code) > _CELL_LIMIT:
            return None
        with contextlib.suppress(WireError):
            return encode(Cell(request.id, request.code))
        return None  # not Unicode: the connection then raises ToolError

    def _write(self, message: bytes | bytearray) -> None:
        # A session that does not read may accept only a part of the message. Then the cell times out.
        os.write(self._channel, message)

    def _return_message(self, spent_s: float) -> ReturnPython:
        running = self._running
        id_ = 0 if running is None else running.id
        return ReturnPython(id_, running, spent_s, bytes(self._output), bytes(self._received))

    def _feed(self, data: bytes) -> PythonDone | None:
        self._received += data
        if not data or self._running is None or len(self._received) > _CELL_LIMIT:
            raise WireError("the session has exited, or sent an unexpected or long message")
        frames = Framer(_CELL_LIMIT).feed(self._received)
        if not frames:
            return None
        done = decode_cell_done(frames[0])
        if done.id != self._running.id or len(frames[0]) + HEADER_SIZE != len(self._received):
            raise WireError("the result of another cell, or more than one result")
        self._received.clear()
        text, omitted = self._text()
        return PythonDone(done.id, text, omitted, done.error, False, "", done.display)
