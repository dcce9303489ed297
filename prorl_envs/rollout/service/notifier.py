"""Notifier of waiting requests: about all results, or about those of one group."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from prorl_envs.clock import Clock

#: The topic of every result.
EVERYTHING = ""


class Notifier:
    """Events by topic. An event exists as long as a caller waits for it.

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
        """Wake all waiting requests; no further request waits."""
        self._closed = True
        self.notify(*self._events)

    async def follow[V](self, look: Callable[[], Awaitable[tuple[V, bool]]], topic: str, wait_s: float) -> V:
        """Call `look` now and at each change of a topic, until it is done or the time is up.

        Args:
            look: returns a view, and whether the wait is over.
            topic: the topic.
            wait_s: maximum wait, seconds.

        Returns:
            the last view.
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
        """Return the event of the next change of a topic. Subscribe before reading the state, so that no
        change is missed."""
        event = self._events.get(topic)
        if event is None:
            event = self._events[topic] = asyncio.Event()
        return event
