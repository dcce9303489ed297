"""Batch plan: decides which groups a batch starts, keeps and cancels. Pure; it performs no action.

A batch needs a number of informative groups from a stream of tasks. Three mechanisms shorten its wait for the
slowest samples (the asynchronous DAPO of ProRL Agent, arXiv 2603.18815):

- Replenishment: a group that is decided to be uninformative is replaced at once, and more groups may be in
  flight than are still missing.
- Early termination: unneeded samples of decided groups, and unneeded groups of the batch, are cancelled.
- Carry-over: groups in flight when the batch is complete may continue, and count for a later batch.

The state of a plan follows from stored data: the batch, its groups, and their outcomes in the order of their
cursors. A plan that receives the same outcomes in the same order makes the same decisions, so a killed
service resumes without counting anything twice. The pending actions (`to_start`, `unneeded`) are computed
from the current state. So they are not lost if the worker stops before it has carried them out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prorl_envs.rollout.api.batches import BatchRequest, BatchState, GroupFilter
from prorl_envs.rollout.store.base import SPREAD, deviation


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """Outcome of a sample.

    Args:
        cursor: cursor of the sample's result. Outcomes are handled in the order of their cursors.
        reward: the reward, or None; then `failure` is the failure kind.
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
        reason: reason why the group is not informative, or "".
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
    """Group of a batch.

    Args:
        id: id of the group.
        samples: number of samples.
        weight_version: weight version of the batch that started the group.
        ended: outcomes of finished samples by sample index, in the order of their cursors.
    """

    id: str
    samples: int
    weight_version: int | None = None
    ended: dict[int, SampleOutcome] = field(default_factory=dict)

    @property
    def pending(self) -> list[int]:
        """Samples without an outcome."""
        return [sample for sample in range(self.samples) if sample not in self.ended]


def judge(rules: BatchRequest, group: PlannedGroup) -> GroupDecision | None:
    """Return the decision on a group, or None while it is undecided. Must be called after each outcome.

    A group is decided when `min_rewards` samples have a reward, when this number can no longer be reached, or
    when all samples have an outcome.
    """
    rewarded = {sample: ended.reward for sample, ended in group.ended.items() if ended.reward is not None}
    pending = group.samples - len(group.ended)
    enough = min(rules.min_rewards or group.samples, group.samples)
    possible = len(rewarded) + pending >= (enough if rules.min_rewards else 1)
    if len(rewarded) < enough and pending and possible:
        return None
    samples = tuple(sorted(rewarded))
    rewards = tuple(rewarded[sample] for sample in samples)
    if len(rewarded) < (enough if rules.min_rewards else 1):
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
    """Return True if a group is fresh enough to be carried into a batch of this weight version. If either
    version is unknown, it is not, unless `max_staleness` is None."""
    if max_staleness is None:
        return True
    if version is None or group.weight_version is None:
        return False
    return version - group.weight_version <= max_staleness


class BatchPlan:
    """Groups of one batch, the decisions on them, and the pending actions.

    Args:
        rules: request of the batch, which has the rules of the selection.
    """

    def __init__(self, rules: BatchRequest) -> None:
        self.rules = rules
        self.tasks = 0
        self.started = 0
        self.closed = False
        self.groups: dict[str, PlannedGroup] = {}
        self.decisions: dict[str, GroupDecision] = {}
        self.selected: list[str] = []  # ids of the informative groups, in the order of their decisions
        self.chosen: list[tuple[str, int]] = []  # samples to train on: those of `GroupDecision.samples`
        self.counts: Counter[GroupOutcome] = Counter()
        self.reasons: Counter[str] = Counter()  # reasons why decided groups are not informative
        self.failures: Counter[str] = Counter()  # reasons why samples of decided groups have no reward
        self.passed_on: frozenset[str] | None = None  # groups of a later batch; None if no batch carried over
        self._open: dict[str, None] = {}  # undecided groups, in order of arrival
        self._unneeded: dict[str, set[int]] = {}  # samples to cancel, by group
        self._cancelled_at: int | None = None  # cursor of the last result that counts after a cancellation

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
        """Groups without a decision. Once the batch is finished, groups are no longer decided."""
        return list(self._open)

    @property
    def carriable(self) -> list[PlannedGroup]:
        """Groups that a later batch may take over."""
        if self.state is not BatchState.COMPLETE or self._discards_leftover():
            return []
        return [self.groups[group] for group in self._open]

    # Events.

    def add_tasks(self, count: int, *, closed: bool) -> None:
        """Append `count` tasks to the stream. `closed`: no further tasks will follow."""
        self.tasks += count
        self.closed = self.closed or closed

    def begin(self, index: int, group: PlannedGroup) -> None:
        """Add a group without outcomes, which was started for the task with this index."""
        self.started = max(self.started, index + 1)
        self.take(group)

    def take(self, group: PlannedGroup) -> None:
        """Add a group without outcomes: started now, stored earlier, or carried over from another batch."""
        self.groups[group.id] = group
        self._open[group.id] = None
        if self._discards_leftover():
            self._mark_unneeded(group)

    def adopt(self, groups: Iterable[PlannedGroup]) -> None:
        """Add groups of an earlier batch, with their outcomes so far."""
        adopted = list(groups)
        for group in adopted:
            self.take(PlannedGroup(group.id, group.samples, group.weight_version))
        self.replay(adopted)

    def replay(self, groups: Iterable[PlannedGroup]) -> None:
        """Replay the outcomes of groups that were added before, in the order of their cursors."""
        ended = [(outcome, group.id, sample) for group in groups for sample, outcome in group.ended.items()]
        for outcome, group_id, sample in sorted(ended, key=lambda item: item[0].cursor):
            self.ended(group_id, sample, outcome)

    def ended(self, group_id: str, sample: int, outcome: SampleOutcome) -> GroupDecision | None:
        """Record the outcome of a sample. Return the decision on the group if this outcome decided it. A
        repeated outcome and an outcome of an unknown group are ignored."""
        group = self.groups.get(group_id)
        if group is None or sample in group.ended:
            return None
        group.ended[sample] = outcome
        if unneeded := self._unneeded.get(group_id):
            unneeded.discard(sample)
            if not unneeded:
                del self._unneeded[group_id]
        if group_id not in self._open or self._finished_before(outcome.cursor):
            return None
        decision = judge(self.rules, group)
        if decision is not None:
            self._decide(group, decision)
        return decision

    def cancel(self, cursor: int) -> None:
        """Cancel the batch. Outcomes after this cursor no longer decide groups."""
        if self._cancelled_at is None:
            self._cancelled_at = cursor
        self._discard_leftover()

    def pass_on(self, names: Iterable[str]) -> list[PlannedGroup]:
        """Remove these carriable groups from this batch and return them, so that a later batch can adopt
        them. The other carriable groups are no longer needed."""
        self.passed_on = frozenset(names)
        handed_over = [self.groups.pop(name) for name in self.passed_on if name in self.groups]
        for group in handed_over:
            self._open.pop(group.id, None)
        self._discard_leftover()
        return handed_over

    # Pending actions.

    def to_start(self) -> range:
        """Return the indices of the tasks for which groups should be started now."""
        return range(self.started, min(self.tasks, self.started + self._room()))

    @property
    def waiting_for_tasks(self) -> bool:
        return not self.closed and self.started == self.tasks and self._room() > 0

    def unneeded(self) -> list[tuple[str, int]]:
        """Return the samples to cancel, as group id and sample."""
        return [(name, sample) for name, samples in self._unneeded.items() for sample in sorted(samples)]

    # Helpers.

    def _room(self) -> int:
        if self.state is not BatchState.RUNNING:
            return 0
        limit = self.rules.in_flight or self.rules.groups
        if self.rules.max_speculative_groups is not None:
            limit = min(limit, self.rules.groups - len(self.selected) + self.rules.max_speculative_groups)
        return max(0, limit - len(self._open))

    def _decide(self, group: PlannedGroup, decision: GroupDecision) -> None:
        del self._open[group.id]
        self.decisions[group.id] = decision
        self.counts[decision.verdict] += 1
        self.failures.update(ended.failure for ended in group.ended.values() if ended.failure)
        self._mark_unneeded(group)
        if decision.verdict is not GroupOutcome.INFORMATIVE:
            self.reasons[decision.reason] += 1
            return
        self.selected.append(group.id)
        self.chosen += ((group.id, sample) for sample in decision.samples)
        self._discard_leftover()

    def _finished_before(self, cursor: int) -> bool:
        """Return True if the batch was finished before the result with this cursor."""
        if len(self.selected) >= self.rules.groups:
            return True
        return self._cancelled_at is not None and cursor > self._cancelled_at

    def _discards_leftover(self) -> bool:
        if self._cancelled_at is not None:
            return True
        complete = len(self.selected) >= self.rules.groups
        return complete and (self.rules.on_complete == "cancel" or self.passed_on is not None)

    def _discard_leftover(self) -> None:
        if self._discards_leftover():
            for name in self._open:
                self._mark_unneeded(self.groups[name])

    def _mark_unneeded(self, group: PlannedGroup) -> None:
        if pending := group.pending:
            self._unneeded[group.id] = set(pending)
