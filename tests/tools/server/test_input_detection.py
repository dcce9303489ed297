"""Parsing of /proc about a terminal's foreground; test_bash_input.py covers real terminals."""

import select
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.server.input_detection import (
    CALLS,
    ForegroundProcess,
    ForegroundState,
    judge,
    parse_call,
    polled,
    selected,
    watched,
)


def process(*marks: str) -> ForegroundProcess:
    names = ("shell", "stopped", "running", "reads", "polls", "reports")
    return ForegroundProcess(*(name in marks for name in names))


@pytest.mark.parametrize(
    ("processes", "by_line", "situation"),
    [
        ([], True, ForegroundState.BUSY),
        ([process()], True, ForegroundState.BUSY),
        ([process("reads", "polls")], True, ForegroundState.WAITING),
        ([process(), process("reads", "polls")], True, ForegroundState.WAITING),
        ([process("polls")], True, ForegroundState.BUSY),
        ([process("polls")], False, ForegroundState.WAITING),
        ([process("running"), process("reads")], True, ForegroundState.BUSY),
        ([process("shell", "reads")], True, ForegroundState.WAITING),
        ([process("shell", "reads", "reports")], True, ForegroundState.PROMPT),
        ([process("shell", "reports"), process("reads")], True, ForegroundState.WAITING),
        ([process("shell", "stopped"), process("running")], True, ForegroundState.STOPPED),
        ([process("stopped")], True, ForegroundState.BUSY),
    ],
)
def test_the_state_of_a_foreground_is_detected(
    processes: list[ForegroundProcess], by_line: bool, situation: ForegroundState
) -> None:
    assert judge(processes, by_line=by_line) is situation


def test_system_calls_are_parsed_as_the_kernel_writes_them() -> None:
    assert parse_call("0 0x3 0x7ffe 0x400 0x0 0x0 0x0 0x7ffd 0x7fbc\n") == (0, 3, 0x7FFE)
    assert parse_call("running\n") is None
    assert parse_call("-1 0x7ffd 0x7fbc\n") is None
    assert parse_call("") is None


def test_polled_descriptors_are_those_with_a_read_event() -> None:
    entries = struct.pack("=ihhihhihh", 0, select.POLLIN, 0, 5, select.POLLOUT, 0, -1, select.POLLIN, 0)
    assert polled(entries) == {0}
    assert polled(entries[:7]) == set()


@given(st.sets(st.integers(0, 63)))
def test_selected_descriptors_are_the_set_bits(fds: set[int]) -> None:
    assert selected(sum(1 << fd for fd in fds).to_bytes(8, "little")) == fds


def test_watched_descriptors_are_listed() -> None:
    text = "pos:\t0\ntfd:        0 events:     2019 data: 0\ntfd:       11 events: 19 data: b\ntfd:\n"
    assert watched(text) == {0, 11}


@given(st.text(max_size=60), st.binary(max_size=60))
def test_any_input_is_accepted(text: str, data: bytes) -> None:
    for line in (text, f"tfd: {text}"):
        watched(line)
    polled(data)
    selected(data)


def test_system_call_numbers_are_unique() -> None:
    assert set(CALLS) == {"x86_64", "aarch64"}
