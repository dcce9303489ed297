"""Fresh process for one command, used by graders and set-up steps.

Its output is complete when the process exits, even if its children still hold the pipes open. Then its whole
process group is killed, unless the caller wants background processes to continue.
"""

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable

from prorl_envs.tools.protocol.messages import Run, RunDone
from prorl_envs.tools.protocol.output import OutputBuffer
from prorl_envs.tools.protocol.terminal import Open
from prorl_envs.tools.server.loop import EventLoop
from prorl_envs.tools.server.reader import Leftovers, OutputReader

_WRITE_SIZE = 65536


class FreshProcess:
    """Run of one command, from its start to the answer.

    Args:
        loop: the server's loop.
        request: the command to run.
        leftovers: receives the outputs to which background processes may still write.
        answer: called once with the result.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        loop: EventLoop,
        request: Run,
        *,
        leftovers: Leftovers,
        answer: Callable[[RunDone], None],
    ) -> None:
        self._loop = loop
        self._id = request.id
        self._answer = answer
        self._leftovers = leftovers if request.background else None
        self._stdin = memoryview(request.stdin)
        self._timed_out = self._ended = False
        self._started = time.monotonic()
        self._process = start_process(
            request,
            subprocess.PIPE if request.stdin else subprocess.DEVNULL,
            subprocess.PIPE,
            subprocess.PIPE if request.apart else subprocess.STDOUT,
        )
        self._pidfd = os.pidfd_open(self._process.pid)
        self._outputs = [
            (pipe, OutputReader(loop, pipe.fileno(), OutputBuffer(request.output_limit)))
            for pipe in (self._process.stdout, self._process.stderr)
            if pipe is not None
        ]
        loop.watch(self._pidfd, self._on_exit)
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
            loop.watch(self._process.stdin.fileno(), self._on_stdin, write=True)
        self._deadline = loop.call_later(request.timeout_s, self._on_deadline)

    def cancel(self) -> None:
        """Kill the process. The request is answered as for any killed process."""
        self._leftovers = None
        self._kill()

    def close(self) -> None:
        """Kill the process without an answer."""
        self._leftovers = None
        self._kill()
        self._process.wait()
        self._release()

    def _on_stdin(self) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        try:
            written = os.write(fd, self._stdin[:_WRITE_SIZE])
        except BrokenPipeError:  # the process does not read the rest
            written = len(self._stdin)
        self._stdin = self._stdin[written:]
        if not self._stdin:
            self._loop.forget(fd)
            self._process.stdin.close()

    def _on_deadline(self) -> None:
        self._timed_out = True
        self._leftovers = None
        self._kill()

    def _on_exit(self) -> None:
        if self._leftovers is None:
            # Kill the group before its process is reaped: until then, its id cannot be reused.
            self._kill()
        code = self._process.wait()
        for pipe, reader in self._outputs:
            if not reader.drain() and self._leftovers is not None:  # background processes still hold it open
                self._leftovers.adopt(os.dup(pipe.fileno()))
        self._release()
        captured = [reader.buffer.take() for _, reader in self._outputs]
        self._answer(
            RunDone(
                self._id,
                captured[0].data(),
                sum(each.omitted for each in captured),
                None if self._timed_out else code,
                self._timed_out,
                time.monotonic() - self._started,
                b"".join(each.data() for each in captured[1:]),
            )
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _release(self) -> None:
        self._deadline.cancel()
        self._loop.forget(self._pidfd)
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._loop.forget(self._process.stdin.fileno())
            self._process.stdin.close()
        for pipe, reader in self._outputs:
            reader.stop()
            pipe.close()
        os.close(self._pidfd)


def start_process(
    request: Run | Open,
    stdin: int,
    stdout: int,
    stderr: int,
    before_exec: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the requested program, as leader of a session, with this process's environment and the request's
    variables.

    Raises:
        OSError: the program cannot be started.
    """
    try:
        return subprocess.Popen(
            request.argv,
            bufsize=0,
            cwd=request.cwd or None,
            env={**os.environ, **request.env},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=before_exec,
        )
    except (ValueError, IndexError, subprocess.SubprocessError) as error:  # a NUL byte, no argv
        raise OSError(errno.EINVAL, str(error)) from error
