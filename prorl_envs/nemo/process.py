"""Lifetime of the resources servers and agents that NeMo Gym starts."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI

from prorl_envs.sandbox.linux.syscall_wrappers import PR_SET_PDEATHSIG, prctl


def die_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent exits, for every kind of exit."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
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
