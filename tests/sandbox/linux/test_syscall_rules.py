"""Every system call number in the package matches the tables in the kernel's headers."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.sandbox.linux.syscall_rules import ARCHITECTURES, BY_ARGUMENT

#: Locations of the numbers in Linux's headers, by architecture; the first that exists counts.
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
DEFINITION = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", re.MULTILINE)


def kernel_numbers(machine: str) -> Mapping[str, int]:
    """Return an architecture's numbers by the names of their calls."""
    header = next((path for path in map(Path, HEADERS[machine]) if path.is_file()), None)
    if header is None:
        pytest.skip("the kernel's headers (linux-libc-dev) are not installed")
    return {name: int(number) for name, number in DEFINITION.findall(header.read_text())}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_the_filter_are_the_kernels(machine: str) -> None:
    known = kernel_numbers(machine)
    architecture = ARCHITECTURES[machine]
    used = {"seccomp": architecture.seccomp, **architecture.refused, **architecture.absent}
    used |= architecture.by_argument
    assert used == {name: known[name] for name in used}
    assert architecture.by_argument.keys() == BY_ARGUMENT.keys()


def test_both_architectures_refuse_the_same_calls() -> None:
    x86, arm = ARCHITECTURES["x86_64"], ARCHITECTURES["aarch64"]
    assert x86.refused.keys() == arm.refused.keys()
    assert x86.absent.keys() - arm.absent.keys() == {"modify_ldt"}  # only on x86
