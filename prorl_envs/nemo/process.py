"""Lifetime of the resources servers and agents that NeMo Gym starts."""

import ctypes
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent exits, for every kind of exit."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent exited before prctl
        os.kill(os.getpid(), signal.SIGTERM)


def live_within(app: FastAPI, serving: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Hold the context `serving` while `app` runs, inside the app's existing lifespan."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state, serving():
            yield state

    app.router.lifespan_context = lifespan
