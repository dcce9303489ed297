"""The node behind a resources server."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.env.node import Node
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver


@asynccontextmanager
async def open_node() -> AsyncIterator[Node]:
    """This machine's sandboxes while the block runs.

    Raises:
        SandboxError: the machine cannot run sandboxes, and why.
    """
    cache = os.environ.get("PRORL_CACHE_DIR") or Path.home() / ".cache" / "prorl-envs"
    async with Node(BubblewrapDriver(), Path(cache)) as node:
        yield node
