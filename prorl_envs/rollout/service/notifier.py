"""Notifier that wakes waiting requests: at every result, or at the results of one group."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from prorl_envs.clock import Clock

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
