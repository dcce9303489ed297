"""Client of the rollout service for code without an event loop.

```python
with SyncRolloutClient("http://127.0.0.1:8600") as client:
    client.submit([GroupRequest(id="g1", environment="bash", task=row, samples=8)])
    for result in client.follow({"g1"}):
        ...
```

Every method runs the method of the same name of `RolloutClient` in a thread with its own event loop. So it
has the same retries, and also works if an event loop is running, as in a notebook.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, Self, cast

from prorl_envs.rollout.client.client import RolloutClient

_END = object()


def _waiting[**P, T](
    method: Callable[Concatenate[RolloutClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncRolloutClient", P], T]:
    """Wrap a coroutine method as a method that waits for the return value."""

    @wraps(method)
    def call(self: "SyncRolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(method(self._client, *args, **kwargs))

    return call


def _iterating[**P, T](
    method: Callable[Concatenate[RolloutClient, P], AsyncIterator[T]],
) -> Callable[Concatenate["SyncRolloutClient", P], Iterator[T]]:
    """Wrap an asynchronous iterator method as a method that waits for each item."""

    @wraps(method)
    def iterate(self: "SyncRolloutClient", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = cast(AsyncGenerator[T], method(self._client, *args, **kwargs))

        requesting: asyncio.Task[Any] | None = None

        async def next_item() -> T | object:
            nonlocal requesting
            requesting = asyncio.current_task()
            return await anext(items, _END)

        async def close() -> None:
            if requesting is not None:  # a request whose wait a signal interrupted must finish first
                await asyncio.wait([requesting])
            await items.aclose()

        try:
            while (item := self._call(next_item())) is not _END:
                yield cast(T, item)
        finally:
            if self._thread.is_alive():
                self._call(close())

    return iterate


class SyncRolloutClient:
    """Client of one rollout service, usable from any thread. It must be closed; it is a context manager.

    Args:
        url: base URL of the service.
        options: keyword arguments of `RolloutClient`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="rollout-client", daemon=True)
        self._thread.start()
        ready.wait()
        try:
            self._client = self._call(_connect(url, options))
        except BaseException:
            self._stop_thread()
            raise

    def close(self) -> None:
        """Close the connections and stop the thread. Idempotent."""
        if self._thread.is_alive():
            self._call(self._client.aclose())
            self._stop_thread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, ready: threading.Event) -> None:
        async def run_until_closed() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await self._stop.wait()

        asyncio.run(run_until_closed())

    def _stop_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _call[T](self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also if a signal interrupts the wait, since then no caller needs the answer
            future.cancel()
            raise

    def run[T](self, work: Callable[[RolloutClient], Coroutine[Any, Any, T]]) -> T:
        """Run several calls of the asynchronous client as one, and return their result."""
        return self._call(work(self._client))

    submit = _waiting(RolloutClient.submit)
    group = _waiting(RolloutClient.group)
    cancel_group = _waiting(RolloutClient.cancel_group)
    job = _waiting(RolloutClient.job)
    cancel_job = _waiting(RolloutClient.cancel_job)
    result = _waiting(RolloutClient.result)
    page = _waiting(RolloutClient.page)
    acknowledge = _waiting(RolloutClient.acknowledge)
    follow = _iterating(RolloutClient.follow)
    start_episode = _waiting(RolloutClient.start_episode)
    episode = _waiting(RolloutClient.episode)
    run_episode = _waiting(RolloutClient.run_episode)
    open_endpoint = _waiting(RolloutClient.open_endpoint)
    evaluate_episode = _waiting(RolloutClient.evaluate_episode)
    close_episode = _waiting(RolloutClient.close_episode)
    submit_batch = _waiting(RolloutClient.submit_batch)
    append_tasks = _waiting(RolloutClient.append_tasks)
    batch = _waiting(RolloutClient.batch)
    batches = _waiting(RolloutClient.batches)
    cancel_batch = _waiting(RolloutClient.cancel_batch)
    batch_groups = _waiting(RolloutClient.batch_groups)
    batch_results = _iterating(RolloutClient.batch_results)
    status = _waiting(RolloutClient.status)
    pause = _waiting(RolloutClient.pause)
    resume = _waiting(RolloutClient.resume)
    drain = _waiting(RolloutClient.drain)
    dashboard = _waiting(RolloutClient.dashboard)
    login_link = _waiting(RolloutClient.login_link)
    jobs = _waiting(RolloutClient.jobs)
    retry_job = _waiting(RolloutClient.retry_job)
    branch_job = _waiting(RolloutClient.branch_job)
    rewind_job = _waiting(RolloutClient.rewind_job)
    set_limits = _waiting(RolloutClient.set_limits)
    nodes = _waiting(RolloutClient.nodes)
    drain_node = _waiting(RolloutClient.drain_node)
    resume_node = _waiting(RolloutClient.resume_node)
    environments = _waiting(RolloutClient.environments)
    model_servers = _waiting(RolloutClient.model_servers)
    add_model_server = _waiting(RolloutClient.add_model_server)
    remove_model_server = _waiting(RolloutClient.remove_model_server)
    pause_model_servers = _waiting(RolloutClient.pause_model_servers)
    resume_model_servers = _waiting(RolloutClient.resume_model_servers)


async def _connect(url: str, options: dict[str, Any]) -> RolloutClient:
    return RolloutClient(url, **options)
