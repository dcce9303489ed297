"""The event loop of a tool server: descriptors and timers, one thread, no more.

A tool server lives in another pid namespace than its children and may not start threads, and it answers in
tens of microseconds; asyncio would add its own share to each of several events per command.
"""

import selectors
import time
from collections.abc import Callable

type Callback = Callable[[], None]


class Timer:
    """A callback due at a time, unless cancelled before."""

    __slots__ = ("_timers", "callback", "due")

    def __init__(self, due: float, callback: Callback, timers: set["Timer"]) -> None:
        self.due = due
        self.callback = callback
        self._timers = timers
        timers.add(self)

    def cancel(self) -> None:
        self._timers.discard(self)


class Loop:
    """Calls back when a descriptor is ready or a time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # A handful at a time, nearly all cancelled before they are due: a heap would fill up with those.
        self._timers: set[Timer] = set()
        self._running = False

    def watch(self, fd: int, callback: Callback, *, write: bool = False) -> None:
        """Call back whenever `fd` is readable (or writable), until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ, callback)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def forget(self, fd: int) -> None:
        """Unwatch a descriptor that may not be watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callback) -> Timer:
        """Call back once, `delay_s` seconds from now."""
        return Timer(time.monotonic() + delay_s, callback, self._timers)

    def run(self) -> None:
        """Run until `stop`."""
        self._running = True
        while self._running:
            for key, _ in self._selector.select(self._wait_s()):
                # An earlier callback of this round may have closed this descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._fire()

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        self._selector.close()

    def _wait_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(timer.due for timer in self._timers) - time.monotonic())

    def _fire(self) -> None:
        if not self._timers:
            return
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer.due <= now]:
            timer.cancel()
            timer.callback()
