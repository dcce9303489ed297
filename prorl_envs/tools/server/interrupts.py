"""Interrupts of cells that run commands, magics and coroutines.

Imports nothing of this package and uses no syntax newer than Python 3.6: a Jupyter kernel, which runs in an
image's own interpreter, executes the source of this module (`client/jupyter_setup.py`).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

_loop = None  # type: Any


@contextlib.contextmanager
def interrupt_kept() -> "Iterator[None]":
    """Raise KeyboardInterrupt at the end if an interrupt came and the work did not raise it: IPython's
    commands and magics print `^C` or a traceback instead, and the cell would continue until it is killed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    except Exception:  # such as the failure of a command that the interrupt ended
        if not interrupted:
            raise
    finally:
        if signal.getsignal(signal.SIGINT) is on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def run_system(command: "str | bytes | os.PathLike[str]") -> int:
    """Run a command like `os.system`, which however ignores interrupts while the command runs, so that a loop
    of commands would have to be killed. Return the wait status."""
    status = subprocess.call(command, shell=True, close_fds=False)
    return -status if status < 0 else status << 8


def run_coroutine(coroutine: "Any") -> "Any":
    """Run a cell that awaits, on an event loop that lives as long as the session. Return its result.

    An interrupt cancels the cell: otherwise it would continue during the next cell that awaits.
    """
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    task = _loop.create_task(coroutine)
    try:
        return _loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        return _loop.run_until_complete(task)


@contextlib.contextmanager
def no_running_loop() -> "Iterator[None]":
    """Hide the event loop that runs in this thread, a kernel's own: cells can then run theirs."""
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task() if hasattr(asyncio, "current_task") else None  # Python 3.7
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
