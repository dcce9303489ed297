"""Records of the store of groups and results, pages of results, and statistics of groups.

The store contains the requests, the number of attempts of each job, and the results. The state of a running
job is not stored, apart from its sampled answers, see `TurnJournal`. These are written with the other writes.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.types import GroupRequest, GroupStatistics, Result, split_job_id
from prorl_envs.rollout.api.views import JobView

#: Maximum number of tokens in one page of results. A token takes some 25 bytes of JSON.
PAGE_TOKENS = 500_000
#: Maximum number of dropped results whose group, environment and state are stored.
KNOWN_DROPPED = 100_000
#: Maximum numbers of results and tokens that are also cached in memory: some 20 MB.
RECENT_RESULTS, RECENT_TOKENS = 256, 200_000
#: Rewards that differ by at most this amount count as equal.
SPREAD = 1e-9


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Group with its jobs.

    Args:
        request: the submitted request.
        task_id: id of the group's task.
        jobs: one per sample, as stored: a job without a result is `queued`.
        failures: number of attempts of each sample that had failed when its last attempt started.
        batch_id: the batch that the group counts for, or None.
        weight_version: weight version in the request of the batch that started the group.
    """

    request: GroupRequest
    task_id: str
    jobs: tuple[JobView, ...]
    failures: tuple[int, ...]
    batch_id: str | None = None
    weight_version: int | None = None

    @property
    def started_by_batch(self) -> str | None:
        """Id of the batch that started the group. A later batch may have taken the group over."""
        return split_job_id(self.request.id)[0] if self.batch_id else None

    @property
    def complete(self) -> bool:
        return all(job.state.final for job in self.jobs)


@dataclass(frozen=True, slots=True)
class NewGroup:
    """New group, with the id of its validated task and the batch that starts it."""

    request: GroupRequest
    task_id: str
    batch_id: str | None = None
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Stored batch. Its progress is not stored, since it follows from the batch's groups.

    Args:
        request: the submitted request, with the first tasks.
        tenant: name of the batch's lane in the queue.
        carried: groups taken over from `request.carry_from`; `dropped`: number of groups that were too old.
        appended: tasks that were appended later.
        closed: no more tasks will follow.
        cancelled_at: cursor of the newest result when the batch was cancelled; None if it was not cancelled.
    """

    request: BatchRequest
    tenant: str
    carried: tuple[str, ...] = ()
    dropped: int = 0
    appended: tuple[BatchTask, ...] = ()
    closed: bool = True
    cancelled_at: int | None = None


@dataclass(frozen=True, slots=True)
class UnreadResults:
    """Stored results that no reader has acknowledged.

    Args:
        results: number of unread results; `tokens`: number of tokens in their trajectories.
        dropped: number of unread results that the store has dropped; always 0 in a durable store.
    """

    results: int = 0
    tokens: int = 0
    dropped: int = 0

    def __add__(self, change: "UnreadResults") -> "UnreadResults":
        return UnreadResults(
            self.results + change.results, self.tokens + change.tokens, self.dropped + change.dropped
        )


class Recent:
    """Cache of the newest results of a store. Clients that follow the results need no database reads."""

    def __init__(self) -> None:
        self._results: deque[Result] = deque()
        self._tokens = 0

    @property
    def newest(self) -> int:
        """Greatest cursor; 0 if there is no result."""
        return self._results[-1].cursor if self._results else 0

    def add(self, results: Sequence[Result], *, dropped: int) -> None:
        """Add newer results in the order of their cursors, and drop results up to the cursor `dropped`."""
        self._results += results
        self._tokens += sum(map(token_count, results))
        while self._results and (
            self._results[0].cursor <= dropped
            or len(self._results) > RECENT_RESULTS
            or self._tokens > RECENT_TOKENS
        ):
            self._tokens -= token_count(self._results.popleft())

    def after(self, cursor: int) -> Iterator[Result] | None:
        """Return the results after a cursor, or None if the cache may lack some of them."""
        if not self._results or cursor < self._results[0].cursor - 1:
            return None
        # Searches from the end: most readers have read nearly all results.
        older = (count for count, result in enumerate(reversed(self._results)) if result.cursor <= cursor)
        newer = next(older, len(self._results))
        return islice(self._results, len(self._results) - newer, None)


def first_page(results: Iterable[Result], limit: int, max_tokens: int) -> list[Result]:
    """Return the first of these results that fit into a page, see `SqlStore.results`."""
    page: list[Result] = []
    for result in results:
        max_tokens -= token_count(result)
        if page and max_tokens < 0:
            break
        page.append(result)
        if len(page) == limit:
            break
    return page


def token_count(result: Result) -> int:
    """Return the number of tokens of a result's rows."""
    return sum(len(row.ids) for row in result.rows)


def group_statistics(group: StoredGroup) -> GroupStatistics | None:
    """Return the statistics of a group, or None if the group is incomplete.

    A group is informative if its rewards differ: with a group-relative advantage, equal rewards give no
    gradient (the filter of DAPO, arXiv 2503.14476, section 3.2).
    """
    if not group.complete:
        return None
    rewards = [job.reward for job in group.jobs if job.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return GroupStatistics(
        group_id=group.request.id,
        task_id=group.task_id,
        environment=group.request.environment,
        rewards=[job.reward for job in group.jobs],
        mean=mean,
        std=None if mean is None else deviation(rewards, mean),
        informative=bool(rewards) and max(rewards) - min(rewards) > SPREAD,
        failures=dict(Counter(job.failure.value for job in group.jobs if job.failure)),
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Return the population standard deviation."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
