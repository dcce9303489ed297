"""The node behind a resources server."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.config import load_settings
from prorl_envs.env.node import Node
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver


@asynccontextmanager
async def open_node() -> AsyncIterator[Node]:
    """This machine's sandboxes while the block runs. NeMo Gym starts its servers without arguments of ours,
    so the settings come from the environment.

    Raises:
        InputError: a setting is wrong.
        SandboxError: the machine cannot run sandboxes, and why.
    """
    settings = load_settings(environ=os.environ)
    async with Node(BubblewrapDriver(settings.run_dir), settings.cache_dir) as node:
        yield node
