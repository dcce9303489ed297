"""Blocking functions, run in threads beside the event loop."""

import asyncio
from collections.abc import Callable


async def in_thread[**P, T](function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a thread. A cancellation takes effect only after the function has returned."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise
