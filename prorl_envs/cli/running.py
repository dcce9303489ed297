"""Running a command's coroutine so that an interrupt at any moment leaves nothing behind, and long."""

import asyncio
import gc
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from prorl_envs.cli.console import err

#: The shell's custom: 128 and the signal's number.
INTERRUPTED = 130
#: Seconds after which a thread that computes lets another one have the interpreter.
SWITCH_S = 0.0001
#: Objects that come, net, before the collector looks: with Python's 700, some 4 % of a service's time.
YOUNG = 10_000


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end. The first SIGINT or SIGTERM cancels it, so that every context manager closes
    what it holds; further ones change nothing, since nothing good comes of leaving that half done.

    Raises:
        SystemExit: it was interrupted.
    """
    try:
        return asyncio.run(_guarded(main))
    except asyncio.CancelledError:
        err.print("interrupted; everything that ran has been ended")
        raise SystemExit(INTERRUPTED) from None


async def _guarded[T](main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        if not task.cancelling():
            err.print("\ninterrupted: ending what runs ...")
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def settled() -> None:
    """Say that what there is now stays: the collector looks at it no more. A full collection of all that was
    imported holds the event loop for some 90 ms, each time that as much again as a quarter of it has come.

    A thread that wants the interpreter from a busy event loop waits 0.1 ms from now on, not 5: the store's
    lets go of it with every statement, and has to ask for it again.
    """
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
