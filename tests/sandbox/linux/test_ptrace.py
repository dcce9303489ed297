"""Stopped threads go on as if nothing had happened."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl_envs.sandbox.linux import ptrace
from prorl_envs.sandbox.linux.ptrace import Thread

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls of x86-64 only")

_GETPID = 39
#: System calls in which programs wait, each repeated after a stop in its own way.
_WAITS = {
    "sleep": "time.sleep(1)",
    "read": "os.read(0, 1)",
    "poll": "select.select([0], [], [], 60)",
    "poll until a time": "select.select([], [], [], 1)",
    "lock": "lock.acquire(timeout=1)",
    "child": "subprocess.run(['sleep', '1'])",
}


@contextmanager
def waiting(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that waits in a system call, and reports by "x" if a signal interrupts it."""
    script = (
        "import os, select, signal, subprocess, sys, threading, time\n"
        "lock = threading.Lock(); lock.acquire()\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'u'))\n"
        f"os.write(1, b'r')\ntry:\n    {code}\nexcept KeyboardInterrupt:\n    os.write(1, b'x')\n"
        "os.write(1, b'e')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        try:
            assert os.read(program.stdout.fileno(), 1) == b"r"
            while not has_state(program.pid, b"S"):
                time.sleep(0.001)
            yield program
        finally:
            program.kill()


def has_state(pid: int, state: bytes) -> bool:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].startswith(state)


def stopped(pid: int, *, calls: int) -> Thread:
    thread = Thread.stop(pid)
    assert thread is not None
    assert [thread.call(_GETPID) for _ in range(calls)] == [pid] * calls
    return thread


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("code", _WAITS.values(), ids=_WAITS)
def test_an_interrupted_system_call_is_repeated(code: str, calls: int) -> None:
    with waiting(code) as program:
        stopped(program.pid, calls=calls).resume()
        assert program.communicate(b"\n", timeout=60)[0] == b"e"


@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("code", [code.replace("1)", "600)") for code in _WAITS.values()], ids=_WAITS)
def test_a_signal_that_arrives_while_stopped_interrupts_the_call(code: str, calls: int) -> None:
    """The signal came too late if the call were repeated after its handler."""
    with waiting(code) as program:
        thread = stopped(program.pid, calls=calls)
        program.send_signal(signal.SIGINT)
        thread.resume()
        assert program.stdout is not None
        assert program.stdout.read() == b"xe"


def test_no_signal_is_lost_between_calls() -> None:
    with waiting("time.sleep(600)") as program:
        thread = stopped(program.pid, calls=1)
        for number in (signal.SIGUSR1, signal.SIGINT):
            program.send_signal(number)
            thread.call(_GETPID)
        thread.resume()
        assert program.stdout is not None
        assert sorted(program.stdout.read()) == sorted(b"uxe")


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_signal_while_the_thread_is_seized_is_delivered_once(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stops for the signal first, and the interruption is still to come."""
    request = ptrace._ptrace

    def signal_before_interrupt(number: int, tid: int, *arguments: int) -> None:
        if number == ptrace._PTRACE_INTERRUPT:
            monkeypatch.undo()
            os.kill(tid, signal.SIGUSR1)
            while not has_state(tid, b"t"):
                time.sleep(0.001)
        request(number, tid, *arguments)

    with waiting("time.sleep(0.5)") as program:
        monkeypatch.setattr(ptrace, "_ptrace", signal_before_interrupt)
        stopped(program.pid, calls=calls).resume()
        assert program.communicate(timeout=60)[0] == b"ue"
        assert program.returncode == 0


def test_a_thread_that_has_exited_is_reported() -> None:
    with subprocess.Popen(["true"]) as program:
        while not has_state(program.pid, b"Z"):
            time.sleep(0.001)
        with pytest.raises(ProcessLookupError):
            Thread.stop(program.pid)


def test_a_killed_thread_is_reported() -> None:
    with waiting("time.sleep(600)") as program:
        thread = stopped(program.pid, calls=0)
        program.kill()
        with pytest.raises(ProcessLookupError):
            thread.call(_GETPID)
        thread.resume()
