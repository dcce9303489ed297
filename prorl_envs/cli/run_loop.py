"""Runner of a command's coroutine, with a clean shutdown on interrupts."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from prorl_envs.cli.output.console import err
from prorl_envs.stop_signals import on_stop

#: Exit status by the shell's convention: 128 and the signal's number.
INTERRUPTED = 130


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
