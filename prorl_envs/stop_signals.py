"""Signals that ask a command to stop."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stop(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `stop` in the event loop at each SIGINT, SIGTERM and SIGHUP.

    The kernel and the shell both send SIGHUP when the terminal closes. It stays ignored if the parent ignored
    it, as `nohup` does.
    """
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
