"""Notifier of waiting requests: about all results, or about those of one group."""

import asyncio
from weakref import WeakValueDictionary

#: The topic of every result.
EVERYTHING = ""


class Notifier:
    """Events by topic. An event exists as long as a caller waits for it."""

    def __init__(self) -> None:
        self._events: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    def listen(self, topic: str = EVERYTHING) -> asyncio.Event:
        """Return the event that is set at the next change of a topic. To miss no change, subscribe before
        reading the state."""
        event = self._events.get(topic)
        if event is None:
            event = self._events[topic] = asyncio.Event()
        return event

    def tell(self, *topics: str) -> None:
        """Notify the subscribers of these topics, or of all topics if none is given."""
        for topic in topics or list(self._events):
            if event := self._events.pop(topic, None):
                event.set()
