"""Batch plan: decides which groups a batch starts, keeps and cancels. Pure; it performs no action.

A batch wants a number of informative groups from a stream of tasks. Three mechanisms shorten its wait for the
slowest samples (the asynchronous DAPO of ProRL Agent, arXiv 2603.18815):

- replenishment: a group that turns out not to be informative is replaced at once, and more groups may be in
  flight than are missing;
- early termination: samples that a decided group does not need, and groups that the batch does not need, are
  cancelled;
- carry-over: groups in flight when the batch is complete may continue, and count for a later batch.

Everything follows from the stored data: the batch, its groups, and their outcomes in the order of their
cursors. A plan that receives the same outcomes in the same order makes the same decisions, so a killed
service resumes without counting anything twice. The pending actions (`to_start`, `unneeded`) are computed
from the current state and are not events, so they are not lost if the worker stops before it has done them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prorl_envs.rollout.api.batches import BatchState, GroupFilter
from prorl_envs.rollout.store.statistics import SPREAD, deviation


@dataclass(frozen=True, slots=True)
class Rules:
    """Selection rules of a batch; the fields of `BatchRequest`."""

    groups: int
    in_flight: int
    max_speculative_groups: int | None = None
    min_rewards: int | None = None
    filter: GroupFilter | None = field(default_factory=GroupFilter)
    carry: bool = False


@dataclass(frozen=True, slots=True)
class GroupEnded:
    """Outcome of a sample.

    Args:
        cursor: of its result; decisions follow this order.
        reward: None if there is no reward; then `failure` is the failure kind.
    """

    cursor: int
    reward: float | None
    failure: str = ""


class GroupOutcome(StrEnum):
    INFORMATIVE = "informative"
    UNINFORMATIVE = "uninformative"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """Decision on a group.

    Args:
        reason: why it is not informative.
        samples: samples with a reward when the group was decided, ascending; `rewards`: their rewards.
    """

    verdict: GroupOutcome
    reason: str
    samples: tuple[int, ...]
    rewards: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def std(self) -> float:
        return deviation(self.rewards, self.mean)


@dataclass(slots=True)
class PlannedGroup:
    """A group of a batch.

    Args:
        id: of the group.
        samples: number of samples.
        weight_version: of the batch that started it.
        ended: outcomes of its samples, in the order of their cursors.
    """

    id: str
    samples: int
    weight_version: int | None = None
    ended: dict[int, GroupEnded] = field(default_factory=dict)

    @property
    def pending(self) -> list[int]:
        """Samples without an outcome."""
        return [sample for sample in range(self.samples) if sample not in self.ended]


def judge(rules: Rules, group: PlannedGroup) -> GroupDecision | None:
    """Decide on a group; None while it is undecided. Must be called after each outcome: a group is decided by
    its first `min_rewards` rewards, or when so many are no longer possible, or when all samples have an
    outcome.
    """
    given = {sample: ended.reward for sample, ended in group.ended.items() if ended.reward is not None}
    pending = group.samples - len(group.ended)
    enough = min(rules.min_rewards or group.samples, group.samples)
    possible = len(given) + pending >= (enough if rules.min_rewards else 1)
    if len(given) < enough and pending and possible:
        return None
    samples = tuple(sorted(given))
    rewards = tuple(given[sample] for sample in samples)
    if len(given) < (enough if rules.min_rewards else 1):
        return GroupDecision(GroupOutcome.FAILED, "too_few_rewards", samples, rewards)
    reason = uninformative(rules.filter, rewards)
    return GroupDecision(
        GroupOutcome.UNINFORMATIVE if reason else GroupOutcome.INFORMATIVE, reason, samples, rewards
    )


def uninformative(bounds: GroupFilter | None, rewards: Sequence[float]) -> str:
    """Return the reason why a trainer learns nothing from these rewards, or "". With a group-relative
    advantage, equal rewards give no gradient (DAPO, arXiv 2503.14476, section 3.2)."""
    if bounds is None:
        return ""
    spread, mean = max(rewards) - min(rewards), math.fsum(rewards) / len(rewards)
    if spread <= SPREAD:
        return "equal_rewards"
    if spread < bounds.min_spread - SPREAD:
        return "small_spread"
    if bounds.min_mean is not None and mean < bounds.min_mean - SPREAD:
        return "low_mean"
    if bounds.max_mean is not None and mean > bounds.max_mean + SPREAD:
        return "high_mean"
    return ""


def fresh_enough(group: PlannedGroup, version: int | None, max_staleness: int | None) -> bool:
    """Return whether a group may be carried into a batch of this weight version. If either version is
    unknown, no staleness cap is met."""
    if max_staleness is None:
        return True
    if version is None or group.weight_version is None:
        return False
    return version - group.weight_version <= max_staleness


class BatchPlan:
    """The groups of one batch, and the actions that are due for them.

    Args:
        rules: selection rules of the batch.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tasks = 0
        self.started = 0
        self.closed = False
        self.groups: dict[str, PlannedGroup] = {}
        self.judged: dict[str, GroupDecision] = {}
        self.selected: list[str] = []  # informative groups, in the order in which they were decided
        self.chosen: list[tuple[str, int]] = []  # their samples that had a reward when decided
        self.counts: Counter[GroupOutcome] = Counter()
        self.reasons: Counter[str] = Counter()  # why decided groups are not informative
        self.failures: Counter[str] = Counter()  # why samples of decided groups have no reward
        self.passed_on: frozenset[str] | None = None
        self._open: dict[str, None] = {}  # undecided groups, in order of arrival
        self._surplus: dict[str, set[int]] = {}  # samples without an outcome that are not needed
        self._cancelled_at: int | None = None

    # State.

    @property
    def state(self) -> BatchState:
        if len(self.selected) >= self.rules.groups:
            return BatchState.COMPLETE
        if self._cancelled_at is not None:
            return BatchState.CANCELLED
        if self.closed and self.started == self.tasks and not self._open:
            return BatchState.EXHAUSTED
        return BatchState.RUNNING

    @property
    def undecided(self) -> list[str]:
        """Groups without a decision. After the batch is finished it decides on no more groups."""
        return list(self._open)

    @property
    def carriable(self) -> list[PlannedGroup]:
        """Groups that a later batch may take over."""
        if self.state is not BatchState.COMPLETE or self._ends_leftover():
            return []
        return [self.groups[group] for group in self._open]

    # Events.

    def add_tasks(self, count: int, *, closed: bool) -> None:
        """Append `count` tasks to the stream; `closed`: these were the last."""
        self.tasks += count
        self.closed = self.closed or closed

    def begin(self, index: int, group: PlannedGroup) -> None:
        """Add the started group of a task; it has no outcomes yet."""
        self.started = max(self.started, index + 1)
        self.take(group)

    def take(self, group: PlannedGroup) -> None:
        """Add a group without outcomes."""
        self.groups[group.id] = group
        self._open[group.id] = None
        if self._ends_leftover():
            self._spare(group)

    def adopt(self, groups: Iterable[PlannedGroup]) -> None:
        """Add carried-over groups, with their outcomes so far."""
        taken = list(groups)
        for group in taken:
            self.take(PlannedGroup(group.id, group.samples, group.weight_version))
        self.replay(taken)

    def replay(self, groups: Iterable[PlannedGroup]) -> None:
        """Replay the outcomes of groups that were added before, in the order of their cursors."""
        ended = [(ended, group.id, sample) for group in groups for sample, ended in group.ended.items()]
        for outcome, group_id, sample in sorted(ended, key=lambda item: item[0].cursor):
            self.ended(group_id, sample, outcome)

    def ended(self, group_id: str, sample: int, outcome: GroupEnded) -> GroupDecision | None:
        """Record the outcome of a sample and return the decision on the group, if this outcome decided it. A
        repeated outcome, or one of an unknown group, is ignored."""
        group = self.groups.get(group_id)
        if group is None or sample in group.ended:
            return None
        group.ended[sample] = outcome
        if surplus := self._surplus.get(group_id):
            surplus.discard(sample)
            if not surplus:
                del self._surplus[group_id]
        if group_id not in self._open or self._over(outcome.cursor):
            return None
        judgement = judge(self.rules, group)
        if judgement is not None:
            self._decide(group, judgement)
        return judgement

    def cancel(self, at: int) -> None:
        """Cancel the batch; outcomes after the cursor `at` decide nothing any more."""
        if self._cancelled_at is None:
            self._cancelled_at = at
        self._end_leftover()

    def pass_on(self, taken: Iterable[str]) -> list[PlannedGroup]:
        """Hand these leftover groups to a later batch; the other leftover groups are no longer needed. Return
        the groups handed over, which leave this batch."""
        self.passed_on = frozenset(taken)
        gone = [self.groups.pop(name) for name in self.passed_on if name in self.groups]
        for group in gone:
            self._open.pop(group.id, None)
        self._end_leftover()
        return gone

    # Pending actions.

    def to_start(self) -> range:
        """Return the indices of the tasks whose groups should be started now."""
        return range(self.started, min(self.tasks, self.started + self._room()))

    @property
    def waiting_for_tasks(self) -> bool:
        return not self.closed and self.started == self.tasks and self._room() > 0

    def unneeded(self) -> list[tuple[str, int]]:
        """Return the samples to cancel, as group id and sample."""
        return [(name, sample) for name, samples in self._surplus.items() for sample in sorted(samples)]

    # Helpers.

    def _room(self) -> int:
        if self.state is not BatchState.RUNNING:
            return 0
        most = self.rules.in_flight
        if self.rules.max_speculative_groups is not None:
            most = min(most, self.rules.groups - len(self.selected) + self.rules.max_speculative_groups)
        return max(0, most - len(self._open))

    def _decide(self, group: PlannedGroup, judgement: GroupDecision) -> None:
        del self._open[group.id]
        self.judged[group.id] = judgement
        self.counts[judgement.verdict] += 1
        self.failures.update(ended.failure for ended in group.ended.values() if ended.failure)
        self._spare(group)
        if judgement.verdict is not GroupOutcome.INFORMATIVE:
            self.reasons[judgement.reason] += 1
            return
        self.selected.append(group.id)
        self.chosen += ((group.id, sample) for sample in judgement.samples)
        self._end_leftover()

    def _over(self, cursor: int) -> bool:
        """Return whether the batch was finished before the result of this cursor."""
        if len(self.selected) >= self.rules.groups:
            return True
        return self._cancelled_at is not None and cursor > self._cancelled_at

    def _ends_leftover(self) -> bool:
        if self._cancelled_at is not None:
            return True
        complete = len(self.selected) >= self.rules.groups
        return complete and (not self.rules.carry or self.passed_on is not None)

    def _end_leftover(self) -> None:
        if self._ends_leftover():
            for name in self._open:
                self._spare(self.groups[name])

    def _spare(self, group: PlannedGroup) -> None:
        if pending := group.pending:
            self._surplus[group.id] = set(pending)
