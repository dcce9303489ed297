"""Which groups a batch starts, keeps and ends, decided without doing anything.

A batch wants a number of informative groups of a stream of tasks. Three things make it wait less for the
slowest (the asynchronous DAPO of ProRL Agent, arXiv 2603.18815):

- replenishment: a group that turns out not to be informative is replaced at once, and more may be under way
  than are missing;
- early termination: samples that a decided group does not need, and groups that the batch does not need,
  are cancelled;
- carry-over: groups under way when the batch has enough may go on, and count for a later one.

Everything follows from what is kept anyway: the batch, its groups, and their outcomes in the order of their
cursors. A plan that is given the same outcomes in the same order has decided the same, so a service that
was killed goes on where it was, and nothing is counted twice. What is to be done (`to_start`, `unneeded`) is
a question about the present and not an event, so it is not lost with whoever was about to do it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prorl_envs.rollout.batch_types import BatchState, GroupFilter
from prorl_envs.rollout.statistics import SPREAD, deviation


@dataclass(frozen=True, slots=True)
class Rules:
    """What a batch wants; the fields of `BatchRequest`."""

    groups: int
    in_flight: int
    spare: int | None = None
    usable: int | None = None
    filter: GroupFilter | None = field(default_factory=GroupFilter)
    carry: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of a sample.

    Args:
        cursor: of its result; results are decided upon in this order.
        reward: None where there is none; then `failure` is its kind.
    """

    cursor: int
    reward: float | None
    failure: str = ""


class Verdict(StrEnum):
    INFORMATIVE = "informative"
    UNINFORMATIVE = "uninformative"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a group.

    Args:
        reason: why it is not informative.
        samples: those with a reward when it was decided, ascending; `rewards`: theirs.
    """

    verdict: Verdict
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
class Group:
    """A group of a batch.

    Args:
        id: of the group.
        samples: episodes of it.
        weight_version: of the batch that began it.
        ended: what came of its samples, in the order of their cursors.
    """

    id: str
    samples: int
    weight_version: int | None = None
    ended: dict[int, Ended] = field(default_factory=dict)

    @property
    def pending(self) -> list[int]:
        """Samples that have not ended."""
        return [sample for sample in range(self.samples) if sample not in self.ended]


def judge(rules: Rules, group: Group) -> Judgement | None:
    """What a group is, or None while that is open. To be asked after each sample that ended: it is decided
    by the first `usable` rewards, or when so many cannot come any more, or when all have ended."""
    given = {sample: ended.reward for sample, ended in group.ended.items() if ended.reward is not None}
    pending = group.samples - len(group.ended)
    enough = min(rules.usable or group.samples, group.samples)
    possible = len(given) + pending >= (enough if rules.usable else 1)
    if len(given) < enough and pending and possible:
        return None
    samples = tuple(sorted(given))
    rewards = tuple(given[sample] for sample in samples)
    if len(given) < (enough if rules.usable else 1):
        return Judgement(Verdict.FAILED, "too_few_rewards", samples, rewards)
    reason = uninformative(rules.filter, rewards)
    return Judgement(Verdict.UNINFORMATIVE if reason else Verdict.INFORMATIVE, reason, samples, rewards)


def uninformative(bounds: GroupFilter | None, rewards: Sequence[float]) -> str:
    """Why a trainer learns nothing of these rewards, or nothing. With a group-relative advantage, equal
    rewards give no gradient (DAPO, arXiv 2503.14476, section 3.2)."""
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


def fresh_enough(group: Group, version: int | None, max_staleness: int | None) -> bool:
    """Whether a group may be carried into a batch of this weight version. What nobody named a version for
    is within no cap."""
    if max_staleness is None:
        return True
    if version is None or group.weight_version is None:
        return False
    return version - group.weight_version <= max_staleness


class BatchPlan:
    """One batch's groups, and what is to be done about them.

    Args:
        rules: what it wants.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tasks = 0
        self.started = 0
        self.closed = False
        self.groups: dict[str, Group] = {}
        self.judged: dict[str, Judgement] = {}
        self.selected: list[str] = []  # informative groups, in the order in which they were decided
        self.chosen: list[tuple[str, int]] = []  # their samples that count
        self.counts: Counter[Verdict] = Counter()
        self.reasons: Counter[str] = Counter()  # why decided groups are not informative
        self.failures: Counter[str] = Counter()  # why samples of decided groups have no reward
        self.passed_on: frozenset[str] | None = None
        self._open: dict[str, None] = {}  # undecided groups, in the order in which they came
        self._surplus: dict[str, set[int]] = {}  # samples that have not ended and that nobody needs
        self._cancelled_at: int | None = None

    # What is there.

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
        """Groups without a judgement. Once the batch is over they never get one from it."""
        return list(self._open)

    @property
    def leftover(self) -> list[Group]:
        """Groups that a later batch may take over."""
        if self.state is not BatchState.COMPLETE or self._ends_leftover():
            return []
        return [self.groups[group] for group in self._open]

    # Events.

    def add_tasks(self, count: int, *, closed: bool) -> None:
        """The stream goes on by `count` tasks; `closed`: these were the last."""
        self.tasks += count
        self.closed = self.closed or closed

    def begin(self, index: int, group: Group) -> None:
        """The group of a task was started; nothing has come of it."""
        self.started = max(self.started, index + 1)
        self.take(group)

    def take(self, group: Group) -> None:
        """A group is here, of which nothing has come."""
        self.groups[group.id] = group
        self._open[group.id] = None
        if self._ends_leftover():
            self._spare(group)

    def adopt(self, groups: Iterable[Group]) -> None:
        """Groups are carried over, with what has come of them so far."""
        taken = list(groups)
        for group in taken:
            self.take(Group(group.id, group.samples, group.weight_version))
        self.replay(taken)

    def replay(self, groups: Iterable[Group]) -> None:
        """What came of groups that were taken in before, in the order in which it came."""
        ended = [(ended, group.id, sample) for group in groups for sample, ended in group.ended.items()]
        for outcome, group_id, sample in sorted(ended, key=lambda item: item[0].cursor):
            self.ended(group_id, sample, outcome)

    def ended(self, group_id: str, sample: int, outcome: Ended) -> Judgement | None:
        """A sample ended; another time, or of a group that is not here, is nothing new. Returns what was
        decided of the group, where this decided it."""
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
        """Nobody wants the batch any more; what ended after the cursor `at` is decided no more."""
        if self._cancelled_at is None:
            self._cancelled_at = at
        self._end_leftover()

    def pass_on(self, taken: Iterable[str]) -> list[Group]:
        """A later batch takes over these of the leftover groups; nobody needs the rest. Returns those taken,
        which leave this batch."""
        self.passed_on = frozenset(taken)
        gone = [self.groups.pop(name) for name in self.passed_on if name in self.groups]
        for group in gone:
            self._open.pop(group.id, None)
        self._end_leftover()
        return gone

    # What is to be done.

    def to_start(self) -> range:
        """Tasks whose groups are to be started now, by index."""
        return range(self.started, min(self.tasks, self.started + self._room()))

    @property
    def waiting_for_tasks(self) -> bool:
        return not self.closed and self.started == self.tasks and self._room() > 0

    def unneeded(self) -> list[tuple[str, int]]:
        """Samples to cancel, as group id and sample."""
        return [(name, sample) for name, samples in self._surplus.items() for sample in sorted(samples)]

    # Steps.

    def _room(self) -> int:
        if self.state is not BatchState.RUNNING:
            return 0
        most = self.rules.in_flight
        if self.rules.spare is not None:
            most = min(most, self.rules.groups - len(self.selected) + self.rules.spare)
        return max(0, most - len(self._open))

    def _decide(self, group: Group, judgement: Judgement) -> None:
        del self._open[group.id]
        self.judged[group.id] = judgement
        self.counts[judgement.verdict] += 1
        self.failures.update(ended.failure for ended in group.ended.values() if ended.failure)
        self._spare(group)
        if judgement.verdict is not Verdict.INFORMATIVE:
            self.reasons[judgement.reason] += 1
            return
        self.selected.append(group.id)
        self.chosen += ((group.id, sample) for sample in judgement.samples)
        self._end_leftover()

    def _over(self, cursor: int) -> bool:
        """Whether the batch had ended when the result of this cursor came."""
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

    def _spare(self, group: Group) -> None:
        if pending := group.pending:
            self._surplus[group.id] = set(pending)
