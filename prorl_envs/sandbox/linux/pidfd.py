"""Processes held by pidfd, and waiting on descriptors without blocking the event loop.

A pid can be reused between a check and a kill; a pidfd cannot. Every object here belongs to the event loop in
which it was created.
"""

import asyncio
import contextlib
import os
import signal
import socket
import weakref
from collections.abc import Callable

from prorl_envs.sandbox.linux.descriptors import has_exited, receive_descriptors

#: Sockets whose closing stops a process, so no fork of this process may keep them open.
_closed_in_forks: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def not_in_forks(sock: socket.socket) -> None:
    """Register `sock` to be closed in children that this process forks without exec, as multiprocessing does.

    Such a child could outlive a killed service, and keep its sandboxes alive.
    """
    _closed_in_forks.add(sock)


def _close_in_fork() -> None:
    for sock in _closed_in_forks:
        sock.close()


os.register_at_fork(after_in_child=_close_in_fork)


async def readable(fd: int) -> None:
    """Wait until `fd` can be read without blocking. One waiter per descriptor."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def writable(fd: int) -> None:
    """Wait until `fd` can be written without blocking. One waiter per descriptor."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_writer(fd, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(fd)


async def receive(sock: socket.socket, size: int, *, descriptors: int = 0) -> tuple[bytes, list[int]]:
    """Receive one message from a non-blocking socket, with up to `descriptors` passed descriptors.

    Returns:
        The bytes (empty at end of file) and the descriptors, which the caller owns.
    """
    while True:
        try:
            return receive_descriptors(sock, size, descriptors)
        except BlockingIOError:
            await readable(sock.fileno())
        except ConnectionResetError:
            return b"", []


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Process:
    """Process held by its pidfd, not necessarily a child of this process.

    Args:
        pidfd: this object owns it, and closes it once the process has exited.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._on_exit: Callable[[], None] | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._exited)

    @classmethod
    def open(cls, pid: int) -> "Process":
        """Open `pid`, which the caller knows to be alive or unreaped.

        Raises:
            ProcessLookupError: there is no such process.
        """
        return cls(pid, os.pidfd_open(pid))

    @property
    def alive(self) -> bool:
        return not self._ended.is_set() and not has_exited(self.pidfd)

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the event loop once the process has exited; immediately if it has."""
        if self._ended.is_set():
            callback()
        else:
            self._on_exit = callback

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process has exited."""
        self._send(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGSTOP; does nothing if the process has exited."""
        self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        if self._ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self._ended.wait()

    def close(self) -> None:
        """Close the pidfd and stop waiting for the exit. Idempotent; called automatically at the exit."""
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def _exited(self) -> None:
        self.close()
        self._ended.set()
        if self._on_exit is not None:
            callback, self._on_exit = self._on_exit, None  # breaks the reference cycle with its owner
            callback()
