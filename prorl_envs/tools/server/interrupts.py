"""Interrupts of cells that run commands and magics.

Imports nothing of this package and uses no syntax newer than Python 3.6: a Jupyter kernel, which runs in an
image's own interpreter, executes the source of this module (`client/jupyter_setup.py`).
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator


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
