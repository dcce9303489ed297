"""Tracker of read results: readers confirm the results that they received, and only read ones may be dropped.

A response may be lost, so a result that was sent is not read yet. It is read once the same reader asks for
the results after it. Readers have no names: one is recognised by its filter, and by the cursor from which it
was sent results. A request with a later cursor confirms nothing that was not sent: a reader that starts at
the newest result does not mark the results of others as read.

The sent results are only known until the service stops. Those that were not confirmed then stay unread, and
`POST /v1/results/acknowledge` confirms them.
"""

import logging
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field

from prorl_envs.clock import Clock
from prorl_envs.config import RetentionSettings
from prorl_envs.rollout.api.types import Selection
from prorl_envs.rollout.api.views import ResultPage
from prorl_envs.rollout.store.base import Store

log = logging.getLogger(__name__)

#: Seconds between two warnings.
WARN_S = 600.0
#: Most results of one reader, and most readers, that wait for a confirmation. The oldest of them stay unread.
MOST_SENT, MOST_READERS = 100_000, 1_000


@dataclass(slots=True)
class _Sent:
    """Results that were sent to a reader and not confirmed: their cursors, and the end of the last page."""

    cursors: "array[int]" = field(default_factory=lambda: array("q"))
    end: int = 0


class ReadTracker:
    """Marks results as read when readers confirm them, and warns if too many are unread.

    Args:
        store: keeps the results.
        retention: bounds of the results.
        clock: measures the time between two warnings.
    """

    def __init__(self, store: Store, retention: RetentionSettings, clock: Clock) -> None:
        self._store = store
        self._retention = retention
        self._clock = clock
        self._sent: dict[tuple[Selection, int], _Sent] = {}  # by filter and first cursor
        self._starts: dict[Selection, set[int]] = {}
        self._dropped = 0
        self._warned_at: float | None = None

    def sent(self, only: Selection, start: int, page: ResultPage) -> None:
        """Record that a page was sent to the reader that began after the cursor `start`."""
        sent = self._sent.get((only, start))
        if sent is None:
            if not page.results:
                return
            sent = self._sent[only, start] = _Sent()
            self._starts.setdefault(only, set()).add(start)
            if len(self._sent) > MOST_READERS:
                self._forget(*next(iter(self._sent)))
        sent.cursors.extend(result.cursor for result in page.results if result.cursor > sent.end)
        sent.end = max(sent.end, page.next)
        if len(sent.cursors) > MOST_SENT:
            del sent.cursors[: len(sent.cursors) - MOST_SENT]

    def confirmed(self, only: Selection, after: int) -> None:
        """Mark the sent results up to the cursor `after` as read: their reader asks for the next ones."""
        for start in [start for start in self._starts.get(only, ()) if start < after]:
            sent = self._sent[only, start]
            if after > sent.end:  # of another reader
                continue
            count = bisect_right(sent.cursors, after)
            self._store.acknowledge(sent.cursors[:count])
            del sent.cursors[:count]
            if after == sent.end:
                self._forget(only, start)

    def check(self) -> None:
        """Warn if unread results exceed the bounds, or were dropped; at most every `WARN_S` seconds."""
        unread, now = self._store.unread, self._clock.monotonic()
        if self._warned_at is not None and now - self._warned_at < WARN_S:
            return
        if unread.dropped > self._dropped:
            log.warning(
                "%d unread results were dropped: the store in memory keeps service.retention.max_results and "
                "max_tokens; raise them, read sooner, or use a durable service.store",
                unread.dropped - self._dropped,
            )
        elif unread.results > self._retention.max_results or unread.tokens > self._retention.max_tokens:
            log.warning(
                "%d results with %d tokens are unread, more than service.retention: the store keeps them and "
                "grows; read them, or POST /v1/results/acknowledge to let them be dropped",
                unread.results,
                unread.tokens,
            )
        else:
            return
        self._dropped, self._warned_at = unread.dropped, now

    def _forget(self, only: Selection, start: int) -> None:
        del self._sent[only, start]
        self._starts[only].discard(start)
        if not self._starts[only]:
            del self._starts[only]
