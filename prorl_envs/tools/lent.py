"""What a tool server has lent to the host: short commands and cells run without waking the server.

The server keeps the shell, or the Python session, and lends the descriptors by which it is driven: its
output, the channel on which it says how things ended, and the process. The host then begins a request and
reads its end itself. Whatever is out of the ordinary goes back to the server, with what was read until then:
what is not over at once, or writes much, or is to be stopped; a text that cannot be typed; input; output
while nothing runs; the end of the process. So nothing is decided here, and a sandbox takes little of the
host's time.
"""

import asyncio
import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from prorl_envs.sandbox.base import Begun
from prorl_envs.tools.dialects import BASH
from prorl_envs.tools.foreground import settings
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.reports import Reports
from prorl_envs.tools.terminal import end, put_text
from prorl_envs.tools.wire import (
    HEADER_SIZE,
    Adopt,
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

#: How many descriptors come with a loan: output, channel, process.
DESCRIPTORS = 3
#: Seconds after which a request, at the latest twice that, is the server's; and where there is none yet, for
#: to start one costs more.
_HOLD_S, _BORN_HOLD_S = 0.02, 0.1
#: Bytes of output after which it is.
_OUTPUT_LIMIT = 16 * 1024
#: Bytes of a command's text beyond which it is, for they stay in memory.
_TEXT_LIMIT = 64 * 1024
#: Bytes of a cell, and of how it ended, beyond which it is.
_CELL_LIMIT = 16 * 1024
_CHANNEL_SIZE, _OUTPUT_SIZE = 8192, 65536
#: Reads that empty an output whose writers may go on.
_DRAIN_READS = 16

type GiveBack = Callable[[Request], None]
type Answer = Callable[[BashDone | PythonDone], None]


class Lent[RequestT: Bash | Python](ABC):
    """Watches its descriptors from here on, in the running loop, until `give_back` or `close`.

    Args:
        descriptors: DESCRIPTORS of them, owned from here on.
        output_limit: bytes of output kept of each request.
        give_back: takes the message for the server that ends this.
        answer: takes the answer to a request.

    Raises:
        OSError, ValueError: the descriptors are not what they should be.
    """

    _hold_s = _HOLD_S
    #: What output and channel are.
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
                    raise ValueError(f"descriptor {fd} is not what it should be")
            self._loop.add_reader(self._source, self._on_output)
            self._loop.add_reader(self._channel, self._on_channel)
            self._loop.add_reader(self._process, self.give_back)
        except (OSError, ValueError):
            self.close()
            raise

    def begin(self, request: RequestT) -> bool:
        """Have a request run; False where it was given back instead."""
        words = self._words(request)
        if words is None:
            self.give_back()
            return False
        try:
            self._say(words)
        except OSError:  # nobody reads it, or it is gone: the server finds out what is the matter
            self.give_back()
            return False
        self._running, self._started = request, self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._started + self._hold_s, self._on_time)
        return True

    def runs(self, request_id: int) -> bool:
        """Whether this request is under way here."""
        return self._running is not None and self._running.id == request_id

    def give_back(self) -> None:
        """Let the server go on."""
        self.close()
        self._give_back(self._returned(self._loop.time() - self._started))

    def close(self) -> None:
        """Close the descriptors, and do nothing more."""
        self._let_go()
        for fd in self._descriptors:
            os.close(fd)

    def _let_go(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._descriptors:
            self._loop.remove_reader(fd)

    @abstractmethod
    def _words(self, request: RequestT) -> bytes | bytearray | None:
        """What begins a request; None where the server has to."""

    @abstractmethod
    def _say(self, words: bytes | bytearray) -> None:
        """Raises OSError where it cannot be said at once."""

    @abstractmethod
    def _returned(self, spent_s: float) -> Request:
        """The message that ends the loan."""

    @abstractmethod
    def _hear(self, data: bytes) -> BashDone | PythonDone | None:
        """The answer to the running request, where these bytes of the channel complete it.

        Raises:
            WireError: they are the server's to judge.
        """

    def _on_time(self) -> None:
        self._timer = None
        if self._running is None:
            return
        due = self._started + self._hold_s
        if due <= self._loop.time():
            self.give_back()
        else:
            self._timer = self._loop.call_at(due, self._on_time)

    def _on_output(self) -> None:
        # Mostly the end is there as well by now: that saves a round of the loop.
        if self._running is not None and self._on_channel():
            return
        allowed = 0 if self._running is None else _OUTPUT_LIMIT
        if not self._read_output() or len(self._output) > allowed:
            self.give_back()

    def _read_output(self) -> bool:
        """Read once; returns whether there may be more, now or later."""
        try:
            data = os.read(self._source, _OUTPUT_SIZE)
        except BlockingIOError:  # a terminal may seem readable and yet have nothing
            return True
        except OSError:  # EIO: a terminal's last user has left
            return False
        self._output += data
        return bool(data)

    def _on_channel(self) -> bool:
        """Returns whether that was the end of the request, or of the loan."""
        try:
            data = os.read(self._channel, _CHANNEL_SIZE)
        except BlockingIOError:  # read with the output
            return False
        except ConnectionResetError:
            data = b""
        try:
            done = self._hear(data)
        except WireError:
            self.give_back()
            return True
        if done is None:
            return False
        self._running = None
        self._answer(done)
        return True

    def _text(self) -> tuple[str, int]:
        """The output of the request that has ended, what was written before its end included; and bytes left
        out. See `OutputReader.drain`."""
        before = -1
        for _ in range(_DRAIN_READS):
            if len(self._output) == before:
                break
            before = len(self._output)
            self._read_output()
        data, self._output = self._output, bytearray()
        if len(data) <= self._output_limit:
            return data.decode("utf-8", "replace"), 0
        buffer = OutputBuffer(self._output_limit)
        buffer.feed(bytes(data))
        captured = buffer.take()
        return captured.text(), captured.omitted


class LentShell(Lent[Bash]):
    """A shell. Its output is its terminal, its channel the pipe of reports.

    Args:
        session: whose shell it is.
        done: the answer with which it was lent.
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

    def _words(self, request: Bash) -> bytes | None:
        nonce = os.urandom(8).hex()
        line, content = BASH.line(request.command, nonce=nonce, status=self._status)
        if request.is_input or request.restart or settings(self._source) != self._settings:
            return None
        if content is not None and not self._put(content):
            return None
        self._nonce = nonce
        return line

    def _put(self, content: bytes) -> bool:
        """Put what cannot be typed where the shell reads it; False where that is not known here."""
        return False

    def _say(self, words: bytes | bytearray) -> None:
        os.write(self._source, words)

    def _returned(self, spent_s: float) -> Return:
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

    def _hear(self, data: bytes) -> BashDone | None:
        report = self._reports.feed(data, self._nonce)
        if not data or self._running is None:
            raise WireError("the shell is gone, or says something unasked")
        if report is None:
            return None
        self._status, self._cwd = report
        text, omitted = self._text()
        return BashDone(self._running.id, text, omitted, self._status, self._cwd, False, "")


class BornShell(LentShell):
    """A shell that no server began, as if lent by the one that is still to come.

    Args:
        begun: its descriptors, owned from here on.
        settings: its terminal's, as it was begun.
    """

    _hold_s = _BORN_HOLD_S

    def __init__(
        self,
        session: str,
        begun: Begun,
        cwd: str,
        settings: bytes,
        *,
        output_limit: int,
        give_back: GiveBack,
        answer: Answer,
    ) -> None:
        self._begun, self._settings_begun = begun, settings
        done = BashDone(0, "", 0, 0, cwd, False, "", lent=settings)
        descriptors = begun.terminal, begun.report, begun.process
        super().__init__(
            session, done, descriptors, output_limit=output_limit, give_back=give_back, answer=answer
        )
        try:
            os.write(begun.terminal, BASH.prepare.encode())
        except OSError:
            self.close()
            raise

    def _put(self, content: bytes) -> bool:
        if len(content) > _TEXT_LIMIT:
            return False
        put_text(self._begun.text, content)
        return True

    @property
    def adoption(self) -> tuple[Adopt, tuple[int, ...]]:
        """What a server is told so that the shell can go to it, and the descriptors that it gets."""
        begun = self._begun
        fds = (begun.terminal, begun.report, begun.process, begun.text, begun.exits)
        return Adopt(0, self._session, begun.pid, self._settings_begun), fds

    def give_back(self) -> None:
        self._let_go()  # the descriptors go with it
        self._give_back(self._returned(self._loop.time() - self._started))

    def close(self) -> None:
        """End the shell with its command."""
        self._let_go()
        end(self._begun)


class LentPython(Lent[Python]):
    """A Python session. Its output is a pipe, its channel the socket for cells. What comes from there is from
    the very process that runs the model's code: it is small and typed, or the server's to judge.
    """

    _kinds = stat.S_ISFIFO, stat.S_ISSOCK

    def __init__(
        self, descriptors: Sequence[int], *, output_limit: int, give_back: GiveBack, answer: Answer
    ) -> None:
        self._heard = bytearray()
        super().__init__(descriptors, output_limit=output_limit, give_back=give_back, answer=answer)

    def _words(self, request: Python) -> bytearray | None:
        if len(request.code) > _CELL_LIMIT:
            return None
        with contextlib.suppress(WireError):
            return encode(Cell(request.id, request.code))
        return None  # no Unicode: the server is not told of it either, and the caller is

    def _say(self, words: bytes | bytearray) -> None:
        # A session that does not read can take a part of it, and then misses its end like that of any cell.
        os.write(self._channel, words)

    def _returned(self, spent_s: float) -> ReturnPython:
        running = self._running
        id_ = 0 if running is None else running.id
        return ReturnPython(id_, running, spent_s, bytes(self._output), bytes(self._heard))

    def _hear(self, data: bytes) -> PythonDone | None:
        self._heard += data
        if not data or self._running is None or len(self._heard) > _CELL_LIMIT:
            raise WireError("the session is gone, says something unasked, or says much")
        frames = Framer(_CELL_LIMIT).feed(self._heard)
        if not frames:
            return None
        done = decode_cell_done(frames[0])
        if done.id != self._running.id or len(frames[0]) + HEADER_SIZE != len(self._heard):
            raise WireError("the end of another cell, or more than one")
        self._heard.clear()
        text, omitted = self._text()
        return PythonDone(done.id, text, omitted, done.error, False, "", done.display)
