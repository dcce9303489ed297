"""Descriptors queued in Unix sockets are counted, and stay queued."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prorl_envs.sandbox.limits import in_flight
from prorl_envs.sandbox.limits.in_flight import Queue, WaitingSocket, count_waiting, read_queues
from prorl_envs.sandbox.limits.policy import ProcessUse
from prorl_envs.sandbox.limits.usage import parse_stat

KINDS = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM, "packet": socket.SOCK_SEQPACKET}

type OpenPair = Callable[[socket.SocketKind], tuple[socket.socket, socket.socket]]


@pytest.fixture
def pair() -> Iterator[OpenPair]:
    with ExitStack() as stack:

        def opened(kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
            return stack.enter_context(ours), stack.enter_context(theirs)

        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    yield fd
    os.close(fd)


def this_process() -> ProcessUse:
    process = parse_stat(Path("/proc/self/stat").read_bytes())
    assert process is not None
    return process


def queued(*sockets: socket.socket) -> Queue:
    """Return the descriptors that are queued in sockets of this process."""
    found = Queue()
    each = [
        WaitingSocket(this_process(), sock.fileno(), (status.st_dev, status.st_ino), count)
        for sock in sockets
        if (count := count_waiting(None, f"/proc/self/fdinfo/{sock.fileno()}"))
        for status in [os.fstat(sock.fileno())]
    ]
    for _, queue in read_queues(each):
        found.files += queue.files
        found.nested += queue.nested
        found.hidden += queue.hidden
    return found


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_all_are_counted_each_time_and_received_afterwards(
    pair: OpenPair, file: int, kind: socket.SocketKind
) -> None:
    sender, receiver = pair(kind)
    sender.send(b"before" * 1000)
    for count in (3, 253, 1):
        socket.send_fds(sender, [b"x" * 9000], [file] * count)
    before = open_descriptors()
    for _ in range(2):
        found = queued(receiver)
        assert (len(found.files), found.hidden) == (257, 0)
        assert {status.st_ino for status in found.files} == {os.fstat(file).st_ino}
    assert open_descriptors() == before
    received: list[int] = []
    while len(received) < 257:
        _, fds, _, _ = socket.recv_fds(receiver, 1 << 16, 253)
        received += fds
    assert {os.fstat(fd).st_ino for fd in received} == {os.fstat(file).st_ino}
    for fd in received:
        os.close(fd)


def test_a_readers_socket_options_are_unchanged(pair: OpenPair, file: int) -> None:
    sender, receiver = pair(socket.SOCK_STREAM)
    receiver.setsockopt(socket.SOL_SOCKET, 42, 2)  # SO_PEEK_OFF
    socket.send_fds(sender, [b"abcdef"], [file])
    assert len(queued(receiver).files) == 1
    assert receiver.recv(2, socket.MSG_PEEK) == b"cd"


def test_sockets_in_flight_are_inspected(pair: OpenPair, file: int) -> None:
    outer, kept = pair(socket.SOCK_STREAM)
    inner, flying = pair(socket.SOCK_STREAM)
    socket.send_fds(inner, [b"x"], [file, file])
    socket.send_fds(outer, [b"x"], [flying.fileno()])
    flying.close()
    found = queued(kept)
    assert (len(found.files), found.nested, found.hidden) == (3, 2, 0)


def test_a_socket_in_flight_in_itself_is_read_once(pair: OpenPair, file: int) -> None:
    sender, receiver = pair(socket.SOCK_STREAM)
    socket.send_fds(sender, [b"x"], [receiver.fileno(), file])
    found = queued(receiver)
    assert (len(found.files), found.hidden) == (2, 0)


def test_empty_datagrams_are_hidden_after_the_count(pair: OpenPair, file: int) -> None:
    sender, receiver = pair(socket.SOCK_DGRAM)
    for _ in range(2):
        socket.send_fds(sender, [b""], [file])
    queued(receiver)
    assert queued(receiver).hidden > 0


def test_over_the_limit_no_socket_is_inspected(
    pair: OpenPair, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "_MOST_INSPECTED", 3)
    sender, receiver = pair(socket.SOCK_STREAM)
    socket.send_fds(sender, [b"x"], [file] * 4)
    found = queued(receiver)
    assert (found.files, found.hidden) == ([], 4)


def test_descriptors_that_arrive_after_the_count_are_closed_too(pair: OpenPair, file: int) -> None:
    sender, receiver = pair(socket.SOCK_STREAM)
    socket.send_fds(sender, [b"x"], [file] * 2)
    status = os.fstat(receiver.fileno())
    counted = WaitingSocket(this_process(), receiver.fileno(), (status.st_dev, status.st_ino), 2)
    for _ in range(3):
        socket.send_fds(sender, [b"x"], [file] * 2)
    before = open_descriptors()
    ((_, queue),) = read_queues([counted])
    assert queue.hidden == 0 and len(queue.files) >= 2
    assert open_descriptors() == before


def test_another_socket_with_the_same_number_is_not_confused_with_it(pair: OpenPair, file: int) -> None:
    sender, receiver = pair(socket.SOCK_STREAM)
    socket.send_fds(sender, [b"x"], [file])
    other = os.fstat(file)
    ((_, queue),) = read_queues(
        [WaitingSocket(this_process(), receiver.fileno(), (other.st_dev, other.st_ino), 1)]
    )
    assert (queue.files, queue.hidden) == ([], 1)


def test_without_permission_nothing_is_reported(
    pair: OpenPair, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = pair(socket.SOCK_STREAM)
    socket.send_fds(sender, [b"x"], [file])

    def refused(*_: int) -> int:
        raise PermissionError(1, "pidfd_getfd")

    monkeypatch.setattr(in_flight, "syscall", refused)
    assert queued(receiver) == Queue()
