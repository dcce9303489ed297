"""Thread with an event loop, for callers of asynchronous environments that have no event loop, or several."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Self

from prorl_envs.env.node import Node

#: Opens the node of a runner; called within its loop.
type NodeFactory = Callable[[], AbstractAsyncContextManager[Node]]


class Runner:
    """Owner of one thread, its event loop and one node. The thread starts at first use: creating and closing
    an unused environment is cheap, and the process can still fork.

    Args:
        node: opens the node.
    """

    def __init__(self, node: NodeFactory = Node.local) -> None:
        self._open_node = node
        self._node: Node | None = None
        self._opening = asyncio.Lock()
        self._exits = AsyncExitStack()
        self._thread: threading.Thread | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this runner: gymnasium copies an environment's arguments, and the copies must share it."""
        return self

    @property
    def node(self) -> Node:
        """The open node, for work that runs in the loop."""
        assert self._node is not None, "outside of a run"
        return self._node

    def run[T](self, make: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        """Run `make(node)` to completion and return its result. An interrupt of the caller cancels it."""
        self.start()
        return self._wait(self._with_node(make))

    async def run_from_loop[T](self, make: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        """Run `make(node)` like `run`, for a caller in another event loop. A cancelled caller cancels it."""
        self.start()
        work = asyncio.run_coroutine_threadsafe(self._with_node(make), self._loop.result())
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Close the node, stop the loop and join the thread. Idempotent; another `run` starts it again."""
        if self._thread is None:
            return
        try:
            self._wait(self._close_node())
        finally:
            self._loop.result().call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def start(self) -> None:
        """Start the thread, unless it runs. Call this in one thread before several threads call `run`."""
        if self._thread is not None:
            return
        self._loop = Future()
        # A daemon thread, so that an environment that was not closed does not keep the interpreter from
        # exiting. The driver's processes die with this thread.
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._main(),), name="prorl-runner", daemon=True
        )
        self._thread.start()

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop.result())
        finished = threading.Lock()
        finished.acquire()
        future.add_done_callback(lambda _: finished.release())
        try:
            # Not `future.result()`: an interrupt can break its condition variable (RuntimeError).
            finished.acquire()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    async def _with_node[T](self, make: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        async with self._opening:
            if self._node is None:
                self._node = await self._exits.enter_async_context(self._open_node())
        return await make(self._node)

    async def _close_node(self) -> None:
        self._node = None
        await self._exits.aclose()
