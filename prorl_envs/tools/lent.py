"""A shell that its tool server has lent to the host: a short command runs without waking the server.

The server keeps the shell, and lends the descriptors by which it is driven: the terminal, the pipe of reports
and the process. The host then types a command and reads its end itself. Whatever is out of the ordinary goes
back to the server, with what was read until then: a command that is not over at once, that writes much, or
is to be stopped; a text that cannot be typed; input; output while no command runs; the end of the shell. So
nothing is decided here, and a sandbox takes little of the host's time.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Sequence

from prorl_envs.tools.dialects import BASH
from prorl_envs.tools.foreground import settings
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.reports import Reports
from prorl_envs.tools.wire import Bash, BashDone, Return

#: How many descriptors come with a lent shell: terminal, reports, process.
DESCRIPTORS = 3
#: Seconds after which a command, at the latest twice that, is the server's.
_HOLD_S = 0.02
#: Bytes of output after which it is.
_OUTPUT_LIMIT = 16 * 1024
_REPORT_SIZE, _OUTPUT_SIZE = 8192, 65536
#: Reads that empty a terminal whose writers may go on.
_DRAIN_READS = 16

type GiveBack = Callable[[Return], None]
type Answer = Callable[[BashDone], None]


class LentShell:
    """Watches its descriptors from here on, in the running loop, until `give_back` or `close`.

    Args:
        session: whose shell it is.
        done: the answer with which it was lent.
        descriptors: DESCRIPTORS of them, owned from here on.
        output_limit: bytes of output kept of each command.
        give_back: takes the message for the server that ends this.
        answer: takes the answer to a command.

    Raises:
        OSError, ValueError: the descriptors are not what they should be.
    """

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
        self._output_limit = output_limit
        self._give_back, self._answer = give_back, answer
        self._terminal, self._report, self._process = self._descriptors = tuple(descriptors)
        self._reports = Reports()
        self._nonce = ""
        self._running: Bash | None = None
        self._output = bytearray()
        self._started = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        try:
            _check(self._terminal, stat.S_ISCHR)
            _check(self._report, stat.S_ISFIFO)
            self._loop.add_reader(self._terminal, self._on_output)
            self._loop.add_reader(self._report, self._on_report)
            self._loop.add_reader(self._process, self.give_back)
        except (OSError, ValueError):
            self.close()
            raise

    def begin(self, request: Bash) -> bool:
        """Have the shell run a command; False where it was given back instead."""
        nonce = os.urandom(8).hex()
        line, content = BASH.line(request.command, nonce=nonce, status=self._status)
        plain = content is None and not (request.is_input or request.restart)
        if not plain or settings(self._terminal) != self._settings:
            self.give_back()
            return False
        self._running, self._nonce = request, nonce
        self._started = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._started + _HOLD_S, self._on_time)
        try:
            os.write(self._terminal, line)
        except OSError:  # nobody reads it, or it is gone: the server finds out what is the matter
            self.give_back()
        return True

    def runs(self, request_id: int) -> bool:
        """Whether this request is under way here."""
        return self._running is not None and self._running.id == request_id

    def give_back(self) -> None:
        """Let the server go on."""
        self.close()
        running = self._running
        self._give_back(
            Return(
                0 if running is None else running.id,
                self._session,
                self._status,
                self._cwd,
                running,
                self._nonce,
                self._loop.time() - self._started,
                bytes(self._output),
                self._reports.rest,
            )
        )

    def close(self) -> None:
        """Close the descriptors, and do nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._descriptors:
            self._loop.remove_reader(fd)
            os.close(fd)

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
        # Mostly the report has come as well by now: that saves a round of the loop.
        if self._running is not None and self._on_report():
            return
        allowed = 0 if self._running is None else _OUTPUT_LIMIT
        if not self._read_output() or len(self._output) > allowed:
            self.give_back()

    def _read_output(self) -> bool:
        """Read once; returns whether there may be more, now or later."""
        try:
            data = os.read(self._terminal, _OUTPUT_SIZE)
        except BlockingIOError:  # a terminal may seem readable and yet have nothing
            return True
        except OSError:  # EIO: its last user has left
            return False
        self._output += data
        return bool(data)

    def _on_report(self) -> bool:
        """Returns whether that was the end of the command, or of the loan."""
        try:
            data = os.read(self._report, _REPORT_SIZE)
        except BlockingIOError:  # read with the output
            return False
        running = self._running
        report = self._reports.feed(data, self._nonce)
        if not data or running is None:
            self.give_back()
        elif report is None:
            return False
        else:
            self._status, self._cwd = report
            self._running = None
            self._drain()
            self._answer(self._done(running.id))
        return True

    def _drain(self) -> None:
        """What was written before the report: see `OutputReader.drain`."""
        before = -1
        for _ in range(_DRAIN_READS):
            if len(self._output) == before:
                break
            before = len(self._output)
            self._read_output()

    def _done(self, request_id: int) -> BashDone:
        text, omitted = _text(self._output, self._output_limit)
        self._output.clear()
        return BashDone(request_id, text, omitted, self._status, self._cwd, False, "")


def _text(output: bytearray, limit: int) -> tuple[str, int]:
    if len(output) <= limit:
        return output.decode("utf-8", "replace"), 0
    buffer = OutputBuffer(limit)
    buffer.feed(bytes(output))
    captured = buffer.take()
    return captured.text(), captured.omitted


def _check(fd: int, kind: Callable[[int], bool]) -> None:
    if not kind(os.fstat(fd).st_mode) or os.get_blocking(fd):
        raise ValueError(f"descriptor {fd} is not what it should be")
