"""Programs that a template process starts."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.sandbox.template.spawn import spawn


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn([str(tmp_path / "absent"), "absent"], [0])


def test_a_started_program_has_a_session_no_environment_and_default_signals() -> None:
    ours, its = socket.socketpair()
    with ours:
        with its:
            script = "cat /proc/self/environ; cut -d' ' -f6 /proc/$$/stat; grep SigIgn /proc/self/status"
            pid = spawn(["/bin/sh", "sh", "-c", f"unset PWD OLDPWD _; {script}"], [its.fileno()])
        said = b"".join(iter(lambda: ours.recv(4096), b"")).split()
        assert os.waitpid(pid, 0) == (pid, 0)
    ignored = int(said[-1], 16)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & 1 << number - 1
    assert said[:-2] == [str(pid).encode()], "no variable; a session of its own"


#: Starts a shell whose descriptors 1, 3 and 4 have, before the start, the numbers given as arguments.
LOW = """\
import os, sys
from prorl_envs.sandbox.template.spawn import spawn
order = list(map(int, sys.argv[1:]))
pipes = [os.pipe() for _ in order]
high = [os.dup2(pipe[1], 64 + index) for index, pipe in enumerate(pipes)]
reads = [os.dup2(pipe[0], 80 + index) for index, pipe in enumerate(pipes)]
os.closerange(3, 64)
low = [os.dup2(fd, number) for fd, number in zip(high, order)]
pid = spawn(["/bin/sh", "sh", "-c", "printf 1; printf 3 >&3; printf 4 >&4"], low)
print(os.waitpid(pid, 0)[1], *(os.read(fd, 9).decode() for fd in reads))
"""


@pytest.mark.parametrize("order", [(3, 4, 5), (4, 5, 3), (5, 3, 4), (5, 4, 3)])
def test_descriptors_may_exchange_their_numbers(order: tuple[int, ...]) -> None:
    command = [sys.executable, "-c", LOW, *map(str, order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "0 1 3 4\n", done.stderr
