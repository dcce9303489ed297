"""The system call filter, in a sandbox and as a program."""

import errno
import platform
import struct
import sys

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.linux.seccomp import filter_program
from prorl_envs.sandbox.linux.syscall_rules import ARCHITECTURES
from tests.support.sandbox_entry import run_script

CALL = (
    "import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True); "
    "print([(libc.syscall(int(n), -1, 0, 0, 0, 0), ctypes.get_errno())[1] for n in sys.argv[1:]])"
)


@pytest.mark.anyio
@pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="no filter on this architecture")
async def test_listed_calls_are_refused_inside(shell_driver: BubblewrapDriver) -> None:
    architecture = ARCHITECTURES[platform.machine()]
    mounts, masks, env = python_runtime()
    sandbox = await shell_driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    try:
        for calls, code in ((architecture.refused, errno.EPERM), (architecture.absent, errno.ENOSYS)):
            numbers = " ".join(map(str, calls.values()))
            output = await run_script(sandbox, f"{sys.executable} -c '{CALL}' {numbers}")
            assert output.strip() == str([code] * len(calls))
        assert "Seccomp:\t2" in await run_script(sandbox, "cat /proc/self/status")
    finally:
        await sandbox.close()


def run_program(program: bytes, number: int, audit: int, arguments: tuple[int, ...] = ()) -> int:
    """Emulate the kernel: a classic BPF machine with the filter's instructions."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    data = {0: number, 4: audit}
    data |= {16 + 8 * index: value for index, value in enumerate((*arguments, 0, 0, 0)[:3])}
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        match code:
            case 0x20:
                accumulator = data[value]
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x54:
                accumulator &= value
            case 0x05:
                at += value
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"no instruction of the filter: {code:#x}")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_program_decides_by_architecture_and_number(name: str) -> None:
    architecture = ARCHITECTURES[name]
    program = filter_program(architecture)
    for number in range(512):
        if number in architecture.by_argument.values():
            continue
        expected = 0x7FFF0000
        if number in architecture.refused.values():
            expected = 0x00050000 | errno.EPERM
        if number in architecture.absent.values():
            expected = 0x00050000 | errno.ENOSYS
        assert run_program(program, number, architecture.audit) == expected
        assert run_program(program, number, 0x40000003) == 0x00050000 | errno.ENOSYS
        assert run_program(program, number | 0x40000000, architecture.audit) == 0x00050000 | errno.ENOSYS


#: Family, type and protocol of a socket, and the error with which it is refused.
SOCKETS = [
    ((1, 1, 0), 0),
    ((1, 5 | 0x80800, 1), 0),
    *[((family, 1 | 0x80000, protocol), 0) for family in (2, 10) for protocol in (0, 6)],
    *[((family, 2 | 0x800, protocol), 0) for family in (2, 10) for protocol in (0, 1, 17, 58)],
    *[((family, 3, 1), 0) for family in (2, 10)],
    *[((16, type_, protocol), 0) for type_ in (2, 3 | 0x80000) for protocol in (0, 4)],
    *[((family, 1, 0), errno.EAFNOSUPPORT) for family in (0, 17, 29, 30, 38, 40, 43, 44)],
    *[((2, type_, 0), errno.ESOCKTNOSUPPORT) for type_ in (0, 4, 5, 5 | 0x80000, 6, 10)],
    *[((10, 1, protocol), errno.EPROTONOSUPPORT) for protocol in (33, 115, 132, 136, 255, 256, 262)],
    *[((16, 3, protocol), errno.EPROTONOSUPPORT) for protocol in (2, 6, 9, 11, 12, 15, 16, 21)],
]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("call", "arguments", "code"),
    [
        ("clone", (0x01200011, 0), 0),
        ("clone", (0x10000011, 0), errno.EPERM),
        ("unshare", (0x00000200, 0), 0),
        ("unshare", (0x10020000, 0), errno.EPERM),
        ("ioctl", (0, 0x5401), 0),
        ("ioctl", (0, 0x5412), errno.EPERM),
        ("ioctl", (0, 0x541C), errno.EPERM),
        ("ioctl", (0, 0x5423), errno.EPERM),
        ("fcntl", (0, 2), 0),
        ("fcntl", (0, 1030), 0),
        ("fcntl", (0, 1024), errno.EINVAL),
        ("fcntl", (0, 1026), errno.EINVAL),
        ("fcntl", (0, 1040), errno.EINVAL),
        *[(call, *case) for call in ("socket", "socketpair") for case in SOCKETS],
    ],
)
def test_some_calls_are_refused_by_their_arguments(
    name: str, call: str, arguments: tuple[int, ...], code: int
) -> None:
    architecture = ARCHITECTURES[name]
    outcome = run_program(
        filter_program(architecture), architecture.by_argument[call], architecture.audit, arguments
    )
    assert outcome == (0x00050000 | code if code else 0x7FFF0000)
