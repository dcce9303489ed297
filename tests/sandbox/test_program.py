"""Programs of system calls, run on both machines; the foreign one is emulated."""

import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from prorl_envs.sandbox.launcher.elf import (
    ANY,
    END,
    FAIL,
    FAILURE,
    WAY,
    Call,
    Jump,
    Label,
    Stack,
    Step,
    Table,
    in_memory,
    program,
    spawn,
)
from prorl_envs.sandbox.linux.descriptors import receive_descriptors

EMULATORS = {"x86_64": "qemu-x86_64-static", "aarch64": "qemu-aarch64-static"}
HERE, VM, VFORK = -100, 0x100, 0x4000
AFTER = Call("write", (1, b"went on", 7))


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of a program: its exit status, its output, and the error and index that it reported."""

    status: int
    said: bytes
    failure: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Running:
    pid: int
    streams: socket.socket
    way: socket.socket

    def end(self) -> Ran:
        """Close its input, and wait for its exit."""
        self.streams.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: self.streams.recv(4096), b""))
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        report = self.way.recv(4096)
        return Ran(status, said, FAILURE.unpack(report) if report else None)


type Runner = Callable[..., Ran]


@contextmanager
def running(machine: str, folder: Path, steps: tuple[Step, ...]) -> Iterator[Running]:
    path = folder / "program"
    path.write_bytes(program(machine, steps))
    path.chmod(0o755)
    command = [str(path), "program"]
    if machine != os.uname().machine:
        emulator = shutil.which(EMULATORS[machine])
        if emulator is None:
            pytest.skip(f"no {EMULATORS[machine]} here to run another machine's program")
        command = [emulator, "emulator", str(path)]
    streams, its_streams = socket.socketpair()
    way, its_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with streams, way:
        with its_streams, its_way:
            pid = spawn(command, [its_streams.fileno(), its_way.fileno()])
        yield Running(pid, streams, way)


#: Programs for another machine need an emulator.
MACHINES = [
    pytest.param(name, marks=[pytest.mark.thorough] * (name != os.uname().machine)) for name in EMULATORS
]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(machine: str, tmp_path: Path) -> Runner:
    """Run a program of these steps with some input."""

    def run_steps(*steps: Step, given: bytes = b"") -> Ran:
        with running(machine, tmp_path, steps) as process:
            if given:
                process.streams.sendall(given)
            return process.end()

    return run_steps


def well(said: bytes = b"") -> Ran:
    return Ran(0, said, None)


def exit_with(status: int) -> Call:
    return Call("exit_group", (status,), least=ANY)


def test_calls_run_in_order_and_block_as_usual(machine: str, tmp_path: Path) -> None:
    steps = (
        Call("prctl", (15, b"named\0", 0, 0, 0)),
        Call("write", (1, b"first ", 6), least=6),
        Call("read", (0, Stack(), 1), least=1),
        Call("write", (1, b"then", 4), least=4),
        Call("read", (0, Stack(), 1)),
    )
    with running(machine, tmp_path, steps) as process:
        assert process.streams.recv(6) == b"first "
        assert Path(f"/proc/{process.pid}/comm").read_text() == "named\n"
        process.streams.sendall(b"x")
        assert process.streams.recv(4) == b"then"
        assert os.waitpid(process.pid, os.WNOHANG) == (0, 0)
        assert process.end() == well()


def test_an_empty_list_of_steps_is_a_program(run: Runner) -> None:
    assert run() == well()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Call("mount", (b"\0", b"/absent\0", b"\0", 4096, 0)), (errno.ENOENT, errno.EPERM)),
        (Call("openat", (77, b"name\0", 0)), (errno.EBADF,)),
        (Call("openat", (HERE, b"/absent/file\0", 0)), (errno.ENOENT,)),
        (Call("setns", (77, 0)), (errno.EBADF,)),
        (Call("rt_sigaction", (9, bytes(32), 0, 8)), (errno.EINVAL,)),
        (Call("close", (77,)), (errno.EBADF,)),
        (Call("chdir", (b"/absent\0",)), (errno.ENOENT,)),
        (Call("wait4", (-1, 0, 0, 0)), (errno.ECHILD,)),
        (Call("prctl", (9999,)), (errno.EINVAL,)),
    ],
    ids=lambda value: value.name if isinstance(value, Call) else "",
)
@pytest.mark.parametrize("before", [0, 1, 300])
def test_a_failing_call_is_reported_with_its_error(
    run: Runner, call: Call, error: tuple[int, ...], before: int
) -> None:
    ran = run(*[Call("umask", (0,))] * before, call, AFTER)
    assert (ran.status, ran.said) == (1, b"")
    assert ran.failure is not None
    number, index = ran.failure
    assert number in error
    assert index == before


def test_labels_and_jumps_count_as_steps(run: Runner) -> None:
    steps = (Label("one"), Jump("two"), Label("two"), Call("close", (77,)))
    assert run(*steps).failure == (errno.EBADF, 3)


@pytest.mark.parametrize(
    ("least", "given", "number"), [(1, b"", 0), (2, b"", 0), (2, b"x", -1), (9, b"1234", -4)]
)
def test_a_result_below_the_minimum_is_a_failure_without_an_error(
    run: Runner, least: int, given: bytes, number: int
) -> None:
    ran = run(Call("read", (0, Stack(), 64), least=least), AFTER, given=given)
    assert ran == Ran(1, b"", (number, 0))


def test_a_result_equal_to_the_minimum_is_no_failure(run: Runner) -> None:
    assert run(Call("read", (0, Stack(), 64), least=4), AFTER, given=b"1234") == well(b"went on")
    assert run(Call("read", (0, Stack(), 64)), AFTER) == well(b"went on")


def test_a_call_that_accepts_any_result_never_fails(run: Runner) -> None:
    absent = Call("openat", (77, b"name\0", 0), least=ANY)
    assert run(absent, absent, AFTER) == well(b"went on")


def test_one_error_can_be_ignored(run: Runner, tmp_path: Path) -> None:
    def make(path: Path) -> Call:
        return Call("mkdirat", (HERE, os.fsencode(path) + b"\0", 0o755), but=errno.EEXIST)

    new = tmp_path / "new"
    assert run(make(new), make(new), AFTER) == well(b"went on")
    assert new.is_dir()
    assert run(make(new), make(tmp_path / "no" / "where"), AFTER) == Ran(1, b"", (errno.ENOENT, 1))


def test_a_failure_can_continue_at_a_label(run: Runner) -> None:
    steps = (
        Call("close", (77,), otherwise="there"),
        AFTER,
        Label("there"),
        Call("write", (1, b"there", 5)),
    )
    assert run(*steps) == well(b"there")
    assert run(Call("close", (77,), otherwise=END), AFTER) == well()
    assert run(Call("close", (77,), but=errno.EBUSY, otherwise=END), AFTER) == well()
    assert run(Call("close", (77,), but=errno.EBADF, otherwise=END), AFTER) == well(b"went on")


def test_jumps_lead_forwards_and_backwards(run: Runner) -> None:
    steps = (
        Jump("read"),
        Label("write"),
        Call("write", (1, Stack(), 1), least=1),
        Label("read"),
        Call("read", (0, Stack(), 1), least=1, otherwise="last"),
        Jump("write"),
        AFTER,
        Label("last"),
    )
    assert run(*steps, given=b"copied") == well(b"copied")
    assert run(Jump(END), AFTER) == well()


def test_a_failure_can_be_a_jump_target(run: Runner) -> None:
    ran = run(Call("umask", (0,)), Jump(FAIL), AFTER)
    assert (ran.status, ran.said) == (1, b"")


@pytest.mark.parametrize("result", [0, 3])
def test_a_jump_depends_on_the_previous_result(run: Runner, result: int) -> None:
    steps = (
        Call("read", (0, Stack(), 8)),
        Jump("none", if_none=True),
        Call("write", (1, b"some", 4)),
        Jump(END),
        Label("none"),
        Call("write", (1, b"none", 4)),
    )
    assert run(*steps, given=bytes(result)) == well(b"some" if result else b"none")


def test_distant_targets_are_reached(run: Runner) -> None:
    many = [Call("umask", (0,), otherwise="far")] * 5000
    assert run(Jump("far"), *many, AFTER, Label("far"), AFTER) == well(b"went on")
    failing = run(*many, Label("far"), Call("close", (77,)))
    assert failing.failure == (errno.EBADF, 5001)


def test_an_undefined_label_is_detected() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        program("x86_64", [Jump("nowhere")])


def test_numbers_may_be_large(run: Runner) -> None:
    text = bytes(range(256)) * 300
    assert run(Call("write", (1, text, len(text)), least=1)) == well(text)


@pytest.mark.parametrize("flags", [0, VM | VFORK], ids=["copied", "same memory"])
def test_a_child_runs_its_own_steps(run: Runner, flags: int) -> None:
    steps = (
        Call("clone", (flags | signal.SIGCHLD, 0, 0)),
        Jump("child", if_none=True),
        Call("wait4", (-1, Stack(), 0, 0), least=1),
        Call("write", (1, Stack(), 4)),
        Jump(END),
        Label("child"),
        Call("write", (1, b"child", 5)),
        exit_with(7),
    )
    assert run(*steps) == well(b"child" + struct.pack("=i", 7 << 8))
    assert run(*steps[:1], Jump("child", if_none=True), Jump(END), Label("child"), exit_with(7)) == well()


def test_a_child_reports_its_own_failure(run: Runner) -> None:
    steps = (
        Call("clone", (signal.SIGCHLD, 0, 0)),
        Jump("child", if_none=True),
        Call("wait4", (-1, Stack(), 0, 0), least=1),
        Call("write", (1, Stack(), 4)),
        Jump(END),
        Label("child"),
        Call("close", (77,)),
    )
    assert run(*steps) == Ran(0, struct.pack("=i", 1 << 8), (errno.EBADF, 6))


def test_another_program_gets_its_arguments_and_environment(run: Runner) -> None:
    script = b'echo "$0 $1" "$NAME $OTHER"\0'
    arguments = Table((b"sh\0", b"-c\0", script, b"zero\0", b"\0", 0))
    environment = Table((b"NAME=a value\0", b"OTHER=\xc3\xa9\0", 0))
    absent = Call("execve", (b"/absent/sh\0", arguments, environment), least=ANY)
    ran = run(absent, Call("execve", (b"/bin/sh\0", arguments, environment)), AFTER)
    assert ran == well(b"zero  a value \xc3\xa9\n")
    assert run(Call("execve", (b"/absent\0", arguments, environment)), AFTER).failure == (errno.ENOENT, 0)


def test_a_message_carries_descriptors(machine: str, tmp_path: Path) -> None:
    control = struct.pack("=Qii2i", 24, socket.SOL_SOCKET, socket.SCM_RIGHTS, 0, WAY)
    message = Table((0, 0, Table((b"some", 2, b"thing", 5)), 2, control, len(control), 0))
    with running(machine, tmp_path, (Call("sendmsg", (WAY, message, 0), least=7),)) as process:
        said, fds = receive_descriptors(process.way, 64, 4)
        assert said == b"sothing"
        its_streams, its_way = (socket.socket(fileno=fd) for fd in fds)
        with its_streams, its_way:
            its_way.send(b"back")
            its_streams.send(b"again")
        assert process.way.recv(64) == b"back"
        assert process.end() == well(b"again")


STACKS: dict[int, tuple[Step, ...]] = {
    0: (Call("pipe2", (Stack(), 0)), Call("write", (1, Stack(), 8))),
    1: (Call("read", (0, Stack(), 8)), Call("write", (1, Stack(), 8))),
    2: (
        Call("clone", (signal.SIGCHLD, 0, 0)),
        Jump("child", if_none=True),
        Call("waitid", (os.P_ALL, 0, Stack(), os.WEXITED, 0)),
        Call("write", (1, Stack(), 128)),
        Jump(END),
        Label("child"),
        exit_with(7),
    ),
    3: (Call("socketpair", (socket.AF_UNIX, socket.SOCK_STREAM, 0, Stack())), Call("write", (1, Stack(), 8))),
}


@pytest.mark.parametrize("index", STACKS)
def test_results_of_calls_are_stored_on_the_stack(run: Runner, index: int) -> None:
    ran = run(*STACKS[index], given=b"12345678" if index == 1 else b"")
    assert ran == well(ran.said)
    match index:
        case 1:
            assert ran.said == b"12345678"
        case 2:
            number, _, code, _, pid, uid, status = struct.unpack_from("=7i", ran.said)
            assert (number, code, status) == (signal.SIGCHLD, os.CLD_EXITED, 7)
            assert (pid > 1, uid) == (True, os.getuid())
        case _:
            first, second = struct.unpack("=2i", ran.said)
            assert WAY < first < second


def test_equal_data_is_stored_once(machine: str) -> None:
    data = b"the same"
    table = Table((data, Table((data, 1)), 0))
    calls = [Call("write", (1, data, 8)), Call("execve", (data, table, table)), Call("umask", (0,))]
    assert program(machine, calls * 9).count(data) == 1


def test_an_unknown_machine_or_call_is_an_error() -> None:
    with pytest.raises(KeyError):
        program("riscv64", ())
    with pytest.raises(KeyError):
        program("x86_64", [Call("reboot", ())])


def test_a_program_in_memory_cannot_be_changed() -> None:
    fd = in_memory(program(os.uname().machine, [exit_with(5)]))
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(again, b"x")
    os.close(again)
    pids = [spawn(["", "sandbox"], [0, fd]) for _ in range(3)]
    os.close(fd)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [5, 5, 5]


def test_an_invalid_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spawn([str(tmp_path / "absent"), "absent"], [0])
    fd = in_memory(b"no program")
    with pytest.raises(OSError, match="Exec format"):
        spawn(["", "sandbox"], [0, fd])
    os.close(fd)


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


#: Starts a program in memory whose descriptor has the number of one that the program receives.
LOW = """\
import os, sys
from prorl_envs.sandbox.launcher import elf as p
order = list(map(int, sys.argv[1:]))
steps = [p.Call("write", (fd, str(fd).encode(), 1)) for fd in (1, 3, 4)]
made = p.in_memory(p.program(os.uname().machine, steps))
pipes = [os.pipe() for _ in range(3)]
sources = [os.dup(fd) for fd in (*(pipe[1] for pipe in pipes), made)]
os.closerange(max(sources) + 1, 64)
high = [os.dup2(fd, 64 + index) for index, fd in enumerate(sources)]
reads = [os.dup2(pipe[0], 80 + index) for index, pipe in enumerate(pipes)]
os.closerange(3, 64)
low = [os.dup2(fd, number) for fd, number in zip(high, order)]
pid = p.spawn(["", "sandbox"], low)
print(os.waitpid(pid, 0)[1], *(os.read(fd, 9).decode() for fd in reads))
"""


@pytest.mark.parametrize("order", [(3, 4, 5, 6), (4, 5, 6, 3), (6, 5, 3, 4), (5, 3, 6, 4)])
def test_descriptors_may_exchange_their_numbers(order: tuple[int, ...]) -> None:
    command = [sys.executable, "-c", LOW, *map(str, order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.stdout == "0 1 3 4\n", done.stderr
