"""Kernel-wide counters: numbers of objects, and detection of the sandbox with too many of them."""

import errno
import os
import select
import socket
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.limits.held_descriptors import MOST_DESCRIPTORS, Holdings, count_watches, holdings
from prorl_envs.sandbox.limits.kernel_counters import (
    Counter,
    counters,
    excess,
    full_counter_errno,
    largest_holder,
)
from prorl_envs.sandbox.limits.policy import ProcessUse

SHARES = {
    "watches": Counter(name="epoll watches", source="x", size=1600, share=200),
    "in_flight": Counter(name="descriptors in flight", source="y", size=400, share=100),
    "descriptors": Counter(name="open files", source="z", size=8000, share=1000, machine=True),
}


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (Holdings(watches=200, in_flight=100, descriptors=1000), ""),
        (Holdings(watches=201), "it holds 201 epoll watches, more than its share of 200"),
        (Holdings(in_flight=101), "it holds 101 descriptors in flight, more than its share of 100"),
        (Holdings(descriptors=1001), "it holds 1001 open files, more than its share of 1000"),
    ],
)
def test_a_sandbox_over_its_share_is_named_with_its_count(held: Holdings, why: str) -> None:
    assert excess(held, SHARES) == why


def test_the_largest_holder_is_killed_once_all_together_hold_three_quarters() -> None:
    calm = {str(number): Holdings(watches=150 + number) for number in range(7)}
    assert largest_holder(calm, SHARES) is None
    chosen = largest_holder({**calm, "a": Holdings(watches=180)}, SHARES)
    assert chosen is not None and chosen[0] == "a" and "epoll watches are running out" in chosen[1]


@pytest.mark.parametrize(
    ("refused", "guilty"),
    [
        (errno.ENOSPC, "watching"),
        (errno.ETOOMANYREFS, "sending"),
        (errno.ENFILE, "opening"),
        (errno.EACCES, None),
    ],
)
def test_the_error_number_names_the_exhausted_resource(refused: int, guilty: str | None) -> None:
    held = {
        "calm": Holdings(watches=5, descriptors=40),
        "watching": Holdings(watches=150),
        "sending": Holdings(in_flight=3),
        "opening": Holdings(descriptors=900),
    }
    chosen = largest_holder(held, SHARES, refused)
    assert (None if chosen is None else chosen[0]) == guilty


def test_no_sandbox_is_killed_if_none_holds_much() -> None:
    assert largest_holder({"a": Holdings(watches=5), "b": Holdings(watches=6)}, SHARES, errno.ENOSPC) is None
    assert largest_holder({}, SHARES, errno.ENOSPC) is None


def test_a_refusal_is_found_among_the_causes_of_an_error() -> None:
    try:
        try:
            raise OSError(errno.ETOOMANYREFS, "too many")
        except OSError as error:
            raise SandboxError("no sandbox") from error
    except SandboxError as error:
        assert full_counter_errno(error) == errno.ETOOMANYREFS
    assert full_counter_errno(SandboxError("no sandbox")) is None
    assert full_counter_errno(PermissionError(errno.EPERM, "no")) is None


def test_the_kernels_total_is_read(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/epoll").mkdir(parents=True)
    (tmp_path / "sys/fs/epoll/max_user_watches").write_text("8000\n")
    (tmp_path / "sys/fs/file-max").write_text(f"{2**63 - 1}\n")
    found = counters(tmp_path)
    assert (found["watches"].size, found["watches"].share) == (8000, 1000)
    assert found["descriptors"].share == MOST_DESCRIPTORS
    assert "watches" not in counters(tmp_path / "none")


def own_use() -> tuple[int, ProcessUse]:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    return proc, ProcessUse(os.getpid(), 0, 0, 1, 0, 0, "test")


def test_watches_are_counted_though_their_descriptors_are_closed() -> None:
    proc, process = own_use()
    before = count_watches(proc, holdings(proc, [process]).epolls, 10**6)[0]
    reader, writer = os.pipe()
    with select.epoll() as epoll:
        numbers = [os.dup(reader) for _ in range(300)]
        for number in numbers:
            epoll.register(number)
        for number in numbers:
            os.close(number)
        held = holdings(proc, [process])
        assert count_watches(proc, held.epolls, 10**6)[0] == before + 300
    for fd in (reader, writer, proc):
        os.close(fd)


def test_descriptors_in_flight_and_memory_files_of_any_number_are_counted() -> None:
    proc, process = own_use()
    before = holdings(proc, [process])
    ours, theirs = socket.socketpair()
    file = os.memfd_create("test")
    os.write(file, bytes(1 << 20))
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [file] * 7)
        held = holdings(proc, [process])
    assert held.in_flight == before.in_flight + 7
    assert held.descriptors == before.descriptors + 3 + 7
    assert sum(held.memory.values()) == sum(before.memory.values()) + (1 << 20)
    os.close(file)
    os.close(proc)
