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
#: Seconds after which a busy thread releases the interpreter to a waiting one.
SWITCH_S = 0.0001
#: Net new objects before the garbage collector runs: with Python's 700, it takes some 4 % of a service's
#: time.
YOUNG = 10_000


def run[T](main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to completion. The first signal to stop cancels it, so that every context manager closes its
    resources; further ones are ignored, so that cleanup is not interrupted.

    Raises:
        SystemExit: `main` was interrupted.
    """
    try:
        return asyncio.run(_guarded(main))
    except asyncio.CancelledError:
        err.print("interrupted; everything that ran has been ended")
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

    A full collection of everything imported blocks the event loop for some 90 ms, each time that the number
    of objects has grown by a quarter. The switch interval becomes 0.1 ms instead of 5: the store's thread
    releases the interpreter with every statement, and has to get it back from a busy event loop.
    """
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
