"""What is read from /proc about a terminal's foreground; how it looks there is for test_bash_input.py."""

import select
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.foreground import (
    CALLS,
    Process,
    Situation,
    judge,
    parse_call,
    polled,
    selected,
    watched,
)


def process(*marks: str) -> Process:
    names = ("shell", "stopped", "running", "reads", "polls", "reports")
    return Process(*(name in marks for name in names))


@pytest.mark.parametrize(
    ("processes", "by_line", "situation"),
    [
        ([], True, Situation.BUSY),
        ([process()], True, Situation.BUSY),
        ([process("reads", "polls")], True, Situation.WAITING),
        ([process(), process("reads", "polls")], True, Situation.WAITING),
        ([process("polls")], True, Situation.BUSY),
        ([process("polls")], False, Situation.WAITING),
        ([process("running"), process("reads")], True, Situation.BUSY),
        ([process("shell", "reads")], True, Situation.WAITING),
        ([process("shell", "reads", "reports")], True, Situation.PROMPT),
        ([process("shell", "reports"), process("reads")], True, Situation.WAITING),
        ([process("shell", "stopped"), process("running")], True, Situation.STOPPED),
        ([process("stopped")], True, Situation.BUSY),
    ],
)
def test_what_a_foreground_is_doing(processes: list[Process], by_line: bool, situation: Situation) -> None:
    assert judge(processes, by_line=by_line) is situation


def test_calls_are_read_as_the_kernel_writes_them() -> None:
    assert parse_call("0 0x3 0x7ffe 0x400 0x0 0x0 0x0 0x7ffd 0x7fbc\n") == (0, 3, 0x7FFE)
    assert parse_call("running\n") is None
    assert parse_call("-1 0x7ffd 0x7fbc\n") is None
    assert parse_call("") is None


def test_polled_descriptors_are_those_to_be_read() -> None:
    entries = struct.pack("=ihhihhihh", 0, select.POLLIN, 0, 5, select.POLLOUT, 0, -1, select.POLLIN, 0)
    assert polled(entries) == {0}
    assert polled(entries[:7]) == set()


@given(st.sets(st.integers(0, 63)))
def test_selected_descriptors_are_the_bits(fds: set[int]) -> None:
    assert selected(sum(1 << fd for fd in fds).to_bytes(8, "little")) == fds


def test_watched_descriptors_are_listed() -> None:
    text = "pos:\t0\ntfd:        0 events:     2019 data: 0\ntfd:       11 events: 19 data: b\ntfd:\n"
    assert watched(text) == {0, 11}


@given(st.text(max_size=60), st.binary(max_size=60))
def test_anything_at_all_is_read(text: str, data: bytes) -> None:
    for line in (text, f"tfd: {text}"):
        watched(line)
    polled(data)
    selected(data)


def test_no_number_has_two_meanings() -> None:
    assert set(CALLS) == {"x86_64", "aarch64"}
