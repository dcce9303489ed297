"""Wakes those who wait for results: of everything, or of one group."""

import asyncio
from weakref import WeakValueDictionary

#: The topic of every result.
EVERYTHING = ""


class News:
    """Events by topic. One lives as long as somebody waits for it."""

    def __init__(self) -> None:
        self._events: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    def listen(self, topic: str = EVERYTHING) -> asyncio.Event:
        """What is set at the next news of a topic. Listen first and look then, and nothing is missed."""
        event = self._events.get(topic)
        if event is None:
            event = self._events[topic] = asyncio.Event()
        return event

    def tell(self, *topics: str) -> None:
        """There is news of these topics; of all where none is named."""
        for topic in topics or list(self._events):
            if event := self._events.pop(topic, None):
                event.set()
