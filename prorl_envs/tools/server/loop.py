"""Event loop of a tool server: descriptors and timers in one thread.

A tool server is in another pid namespace than its children, cannot start threads, and answers in tens of
microseconds. asyncio, or even `selectors`, would add overhead to each of several events per command.

The loop uses poll(2), not epoll(7), because the kernel counts epoll watches per host user, so that another
sandbox could use them up (`fs.epoll.max_user_watches`). For the few descriptors of a tool server, both have
the same cost.
"""

import select
import time
from collections.abc import Callable

#: Maximum seconds of one poll, which accepts less than 2**31 milliseconds.
_MAX_WAIT_S = 3600.0

type Callback = Callable[[], object]


class Timer:
    """Callback that is called at a time, unless it is cancelled before."""

    __slots__ = ("_timers", "callback", "due")

    def __init__(self, due: float, callback: Callback, timers: set["Timer"]) -> None:
        self.due = due
        self.callback = callback
        self._timers = timers
        timers.add(self)

    def cancel(self) -> None:
        """Cancel the timer. Idempotent, also after it was due."""
        self._timers.discard(self)


class EventLoop:
    """Loop that calls back when a descriptor is ready or a timer is due."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._callbacks: dict[int, Callback] = {}
        self._forgotten: set[int] = set()
        # Not a heap, which would fill up with cancelled timers: nearly all are cancelled before they are due.
        self._timers: set[Timer] = set()
        self._running = False

    def watch(self, fd: int, callback: Callback, *, write: bool = False) -> None:
        """Call back whenever `fd` is readable (or writable) or hung up, until `forget`."""
        self._poll.register(fd, select.POLLOUT if write else select.POLLIN)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor, if it was watched. Must precede its close."""
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)
            self._forgotten.add(fd)

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call back once, `delay_s` seconds from now."""
        return Timer(time.monotonic() + delay_s, callback, self._timers)

    def run(self) -> None:
        """Run until `stop`."""
        self._running = True
        while self._running:
            self._forgotten.clear()
            for fd, _ in self._poll.poll(self._wait_ms()):
                # An earlier callback of this round may have closed the descriptor, or reused its number.
                if fd not in self._forgotten:
                    self._callbacks[fd]()
            if self._timers:
                self._fire()

    def stop(self) -> None:
        """Make `run` return after the callbacks of this round."""
        self._running = False

    def _wait_ms(self) -> float | None:
        if not self._timers:
            return None
        due = min(timer.due for timer in self._timers)
        return 1000 * min(max(0.0, due - time.monotonic()), _MAX_WAIT_S)

    def _fire(self) -> None:
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer.due <= now]:
            timer.cancel()
            timer.callback()
