"""A fresh process for one command: what graders and set-up steps use. Nothing of it outlives the call.

Its output is complete when it ends, whatever its own children still hold open, and its whole process group
is killed then.
"""

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from prorl_envs.tools.loop import Loop
from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.reader import OutputReader
from prorl_envs.tools.wire import Run, RunDone

_WRITE_SIZE = 65536


class FreshProcess:
    """One run, from start to answer.

    Args:
        loop: the server's loop.
        request: what to run.
        env: its environment, before the request's own variables.
        answer: called once with the outcome.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, loop: Loop, request: Run, *, env: Mapping[str, str], answer: Callable[[RunDone], None]
    ) -> None:
        self._loop = loop
        self._id = request.id
        self._answer = answer
        self._output = OutputBuffer(request.output_limit)
        self._stdin = memoryview(request.stdin)
        self._timed_out = self._ended = False
        self._started = time.monotonic()
        self._process = _popen(request, env)
        assert self._process.stdout is not None
        self._stdout = self._process.stdout.fileno()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._reader = OutputReader(loop, self._stdout, self._output)
        loop.watch(self._pidfd, self._on_exit)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            loop.watch(self._process.stdin.fileno(), self._on_stdin, write=True)
        self._deadline = loop.call_later(request.timeout_s, self._on_deadline)

    def cancel(self) -> None:
        """End it now; it answers as if it had been killed."""
        self._kill()

    def close(self) -> None:
        """Kill it without an answer."""
        self._kill()
        self._process.wait()
        self._release()

    def _on_stdin(self) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        try:
            written = os.write(fd, self._stdin[:_WRITE_SIZE])
        except BrokenPipeError:  # it does not want to read the rest
            written = len(self._stdin)
        self._stdin = self._stdin[written:]
        if not self._stdin:
            self._loop.forget(fd)
            self._process.stdin.close()

    def _on_deadline(self) -> None:
        self._timed_out = True
        self._kill()

    def _on_exit(self) -> None:
        # The group before the reaping: until then its id cannot be another's.
        self._kill()
        code = self._process.wait()
        self._reader.drain()
        self._release()
        captured = self._output.take()
        self._answer(
            RunDone(
                self._id,
                captured.data(),
                captured.omitted,
                None if self._timed_out else code,
                self._timed_out,
                time.monotonic() - self._started,
            )
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _release(self) -> None:
        self._deadline.cancel()
        for fd in (self._stdout, self._pidfd):
            self._loop.forget(fd)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._loop.forget(self._process.stdin.fileno())
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._pidfd)


def _popen(request: Run, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            request.argv,
            bufsize=0,
            cwd=request.cwd or None,
            env={**env, **request.env},
            stdin=subprocess.PIPE if request.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (ValueError, IndexError, subprocess.SubprocessError) as error:  # a NUL byte, no argv
        raise OSError(errno.EINVAL, str(error)) from error
