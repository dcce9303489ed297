"""Interrupts of cells that run commands, magics and coroutines.

Imports nothing of this package and uses no syntax newer than Python 3.6: a Jupyter kernel, which runs in an
image's own interpreter, executes the source of this module (`client/jupyter_setup.py`).
"""

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Iterator
from typing import Any

_loop = None  # type: Any
#: Code with which an event loop calls a task's next step, and the flags of a coroutine's code.
_HANDLE_RUN = asyncio.Handle._run.__code__
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_GENERATOR


class _Interrupt(object):  # noqa: UP004 - for old interpreters
    """Handler of SIGINT while a cell awaits.

    If KeyboardInterrupt is raised in the code of the event loop, the wake-up of a task may be lost, and the
    task never finishes. So it is raised only in a task's own code; otherwise the cell is cancelled.
    """

    def __init__(self, loop: "Any", task: "Any") -> None:
        self._loop, self._task = loop, task

    def __call__(self, number: int, frame: "Any") -> None:
        if _of_coroutine(frame):
            raise KeyboardInterrupt
        self._task.cancel()
        self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop


def _of_coroutine(frame: "Any") -> bool:
    """Return True if a frame belongs to a coroutine that the cell's event loop runs, not to the loop itself.

    The loop's current task does not show this: while a task is current, the loop's `call_soon` runs too, to
    wake the task up again. In a kernel, the kernel's own loop runs `run_coroutine` in a coroutine.
    """
    outermost = None
    while frame is not None and frame.f_code is not _HANDLE_RUN:
        if frame.f_code is run_coroutine.__code__:
            return False
        outermost, frame = frame, frame.f_back
    return frame is not None and outermost is not None and bool(outermost.f_code.co_flags & _COROUTINE)


def _interruptible() -> bool:
    """Return True if an interrupt would raise KeyboardInterrupt in a cell's code in this thread."""
    handler = signal.getsignal(signal.SIGINT)  # type: Any
    expected = handler is signal.default_int_handler or isinstance(handler, _Interrupt)
    return expected and threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _handling(handler: "Any") -> "Iterator[None]":
    """Set the handler of SIGINT during the block. Then restore it, unless the block has set another."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupt_kept() -> "Iterator[None]":
    """Raise KeyboardInterrupt at the end if an interrupt arrived but the block did not raise it. IPython's
    commands and magics print `^C` or a traceback instead, and the cell would continue until it is killed."""
    if not _interruptible():
        yield
        return
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    with _handling(on_interrupt):
        try:
            yield
        except Exception:  # such as the failure of a command that the interrupt stopped
            if not interrupted:
                raise
    if interrupted:
        raise KeyboardInterrupt


def run_coroutine(coroutine: "Any") -> "Any":
    """Run a cell that awaits, on an event loop that lives as long as the session. Return its result.

    An interrupt cancels the cell, which otherwise would continue during the next cell that awaits.
    """
    global _loop
    if _loop is None or _loop.is_closed():
        _loop = asyncio.new_event_loop()
    task = _loop.create_task(coroutine)
    if not _interruptible():
        return _loop.run_until_complete(task)
    with _handling(_Interrupt(_loop, task)):
        try:
            return _loop.run_until_complete(task)
        except KeyboardInterrupt:  # raised in a task that the cell started
            task.cancel()
            return _loop.run_until_complete(task)


@contextlib.contextmanager
def no_running_loop() -> "Iterator[None]":
    """Hide a kernel's own event loop, which runs in this thread, so that cells can run event loops."""
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = _current_task(loop)
    separate = task is not None and hasattr(asyncio.tasks, "_leave_task")  # since Python 3.7
    if separate:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if separate:
            asyncio.tasks._enter_task(loop, task)


def _current_task(loop: "Any") -> "Any":
    """Return the task whose code `loop` runs at this moment, or None."""
    if hasattr(asyncio, "current_task"):
        return asyncio.current_task(loop)
    return asyncio.Task.current_task(loop)  # type: ignore[attr-defined]  # Python 3.6
