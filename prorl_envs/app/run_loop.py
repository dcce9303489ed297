"""Runner of a command's coroutine: clean shutdown on interrupts, and tuning for long runs."""

import asyncio
import gc
import signal
import sys
from collections.abc import Coroutine
from typing import Any

from prorl_envs.cli.output.console import err
from prorl_envs.stop_signals import on_stop

#: Exit status by the shell's convention: 128 and the signal's number.
INTERRUPTED = 130
#: Seconds after which a busy thread releases the interpreter to a waiting thread.
SWITCH_S = 0.0001
#: Number of new objects that starts the garbage collector. With Python's default of 700, it takes about 4 %
#: of a service's time.
YOUNG = 10_000


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to completion.

    The first signal to stop cancels it, so that every context manager closes its resources. Further signals
    are ignored, so that they do not interrupt the cleanup.

    Raises:
        SystemExit: `main` was interrupted.
    """
    try:
        return asyncio.run(_guarded(main))
    except asyncio.CancelledError:
        err.print("interrupted; all running work was stopped")
        raise SystemExit(INTERRUPTED) from None


async def _guarded[T](main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(main)

    def interrupt(_: signal.Signals) -> None:
        if not task.cancelling():
            task.cancel()
            err.print("\ninterrupted: stopping running work ...")

    with on_stop(interrupt):
        return await task


def settled() -> None:
    """Exempt all current objects from garbage collection, and shorten the interpreter's switch interval.

    A full collection of all imported objects would block the event loop for about 90 ms, each time that the
    number of objects has grown by a quarter. The switch interval is reduced from 5 to 0.1 ms, because the
    store's thread releases the interpreter at every statement, and must get it back from a busy event loop.
    """
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
