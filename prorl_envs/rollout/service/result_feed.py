"""Stored results in the order of their cursors: pages for readers, and calls of observers."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from prorl_envs.clock import Clock
from prorl_envs.rollout.api.types import ALL, Result, Selection
from prorl_envs.rollout.api.views import ResultPage
from prorl_envs.rollout.service.read_tracker import ReadTracker
from prorl_envs.rollout.store.sql import SqlStore

#: The topic of every result.
EVERYTHING = ""


class Notifier:
    """Events by topic: a group id, or `EVERYTHING`. An event exists as long as a caller waits for it.

    Args:
        clock: measures the waits.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._closed = False

    def notify(self, *topics: str) -> None:
        """Wake the requests that wait for these topics."""
        for topic in topics:
            if event := self._events.pop(topic, None):
                event.set()

    async def aclose(self) -> None:
        """Wake all waiting requests. Later requests do not wait."""
        self._closed = True
        self.notify(*self._events)

    async def follow[V](self, look: Callable[[], Awaitable[tuple[V, bool]]], topic: str, wait_s: float) -> V:
        """Call `look` now and at each notification of a topic, until `look` is done or the time is up.

        Args:
            look: returns a view, and True if the caller need not wait for another view.
            topic: the topic.
            wait_s: maximum wait in seconds.

        Returns:
            The last view.
        """
        event = self._subscribe(topic)
        view, done = await look()
        if done or wait_s <= 0:
            return view
        with contextlib.suppress(TimeoutError):  # the last view is returned
            async with self._clock.timeout(wait_s):
                while not done and not self._closed:
                    await event.wait()
                    event = self._subscribe(topic)
                    view, done = await look()
        return view

    def _subscribe(self, topic: str) -> asyncio.Event:
        """Return the event of a topic's next notification. Callers subscribe before they read the state, so
        that they miss no change."""
        event = self._events.get(topic)
        if event is None:
            event = self._events[topic] = asyncio.Event()
        return event


@dataclass(eq=False)
class ResultFeed:
    """Stored results of a service, in the order of their cursors.

    Args:
        store: stores the results.
        readers: tracks which results are read.
        notifier: wakes requests that wait for a result.

    Attributes:
        newest: cursor of the newest stored result.
    """

    store: SqlStore
    readers: ReadTracker
    notifier: Notifier
    newest: int = field(default=0, init=False)
    _observers: list[Callable[[Result], None]] = field(default_factory=list, init=False)

    def subscribe(self, *observers: Callable[[Result], None]) -> None:
        """Call these functions, in this order, with each result that is stored from now on."""
        self._observers.extend(observers)

    def recorded(self, result: Result) -> None:
        """Notify observers and waiting requests of a stored result. Must be called in cursor order."""
        self.newest = max(self.newest, result.cursor)
        for observe in self._observers:
            observe(result)
        self.readers.check()
        self.notifier.notify(EVERYTHING, result.group_id)

    async def page(
        self,
        after: int,
        *,
        limit: int,
        wait_s: float = 0.0,
        only: Selection = ALL,
        acknowledge: bool = True,
    ) -> ResultPage:
        """Return results after a cursor.

        Args:
            after: a cursor; 0 starts with the oldest stored result.
            limit: maximum number of results.
            wait_s: maximum seconds to wait for the first result if there is none.
            only: selects results; the cursor `next` skips all other results.
            acknowledge: mark the results up to `after` that this reader was sent as read.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer stored.
        """
        start = after
        if acknowledge:
            self.readers.confirmed(only, after)

        async def look() -> tuple[ResultPage, bool]:
            nonlocal after
            # `newest` is read before the results, so that the query covers all results up to it.
            newest = await self.store.newest() if only != ALL else 0
            found = await self.store.results(after, limit, only=only)
            after = found[-1].cursor if found else max(after, newest)
            return ResultPage(results=found, next=after), bool(found)

        page = await self.notifier.follow(look, EVERYTHING, wait_s)
        if acknowledge:
            self.readers.sent(only, start, page)
        return page

    async def mark_read(self, result: Result) -> None:
        """Mark a result as read. Async, so that Starlette does not run it in a thread."""
        self.store.acknowledge([result.cursor])

    async def acknowledge(self, after: int, up_to: int, only: Selection = ALL) -> None:
        """Mark the stored results after `after`, up to and including `up_to`, as read."""
        self.store.acknowledge(await self.store.cursors(after, up_to, only))
