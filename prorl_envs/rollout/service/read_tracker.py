"""Tracker of read results. Only results that a reader has confirmed may be dropped.

A response may be lost, so a result that was sent is not read yet. It becomes read when the same reader
requests the results after it. Readers have no names: a reader is identified by its filter and by the cursor
of its first request. A request with a later cursor confirms only results that were sent. So a reader that
starts at the newest result does not mark older results as read.

The tracker is in memory. Results that were sent but not confirmed when the service stops stay unread;
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
from prorl_envs.rollout.store.sql import SqlStore

log = logging.getLogger(__name__)

#: Minimum seconds between two warnings.
WARN_S = 600.0
#: Maximum number of sent results per reader, and of readers, that wait for a confirmation. Beyond these, the
#: oldest are forgotten, and their results stay unread.
MAX_SENT, MAX_READERS = 100_000, 1_000


@dataclass(slots=True)
class _Sent:
    """Cursors of the results that a reader was sent and has not confirmed, and the end of the last page."""

    cursors: "array[int]" = field(default_factory=lambda: array("q"))
    end: int = 0


class ReadTracker:
    """Marks results as read when readers confirm them, and warns if too many are unread.

    Args:
        store: stores the results.
        retention: numbers of results and tokens above which unread results cause a warning.
        clock: measures the time between two warnings.
    """

    def __init__(self, store: SqlStore, retention: RetentionSettings, clock: Clock) -> None:
        self._store = store
        self._retention = retention
        self._clock = clock
        self._sent: dict[tuple[Selection, int], _Sent] = {}  # by filter and first cursor
        self._starts: dict[Selection, set[int]] = {}
        self._dropped = 0
        self._warned_at: float | None = None

    def sent(self, only: Selection, start: int, page: ResultPage) -> None:
        """Record that a page was sent to the reader whose request named the cursor `start`."""
        sent = self._sent.get((only, start))
        if sent is None:
            if not page.results:
                return
            sent = self._sent[only, start] = _Sent()
            self._starts.setdefault(only, set()).add(start)
            if len(self._sent) > MAX_READERS:
                self._forget(*next(iter(self._sent)))
        sent.cursors.extend(result.cursor for result in page.results if result.cursor > sent.end)
        sent.end = max(sent.end, page.next)
        if len(sent.cursors) > MAX_SENT:
            del sent.cursors[: len(sent.cursors) - MAX_SENT]

    def confirmed(self, only: Selection, after: int) -> None:
        """Mark the sent results up to the cursor `after` as read: a reader requests the results after it."""
        for start in [start for start in self._starts.get(only, ()) if start < after]:
            sent = self._sent[only, start]
            if after > sent.end:  # the request is from another reader
                continue
            count = bisect_right(sent.cursors, after)
            self._store.acknowledge(sent.cursors[:count])
            del sent.cursors[:count]
            if after == sent.end:
                self._forget(only, start)

    def check(self) -> None:
        """Warn if unread results exceed the retention limits or were dropped; once per `WARN_S` seconds."""
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
