"""The plan of a batch without a service: groups to start, keep and cancel, for results in any order."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.rollout.api.batches import BatchRequest, BatchState, GroupFilter
from prorl_envs.rollout.batches.dynamic_sampling import (
    BatchPlan,
    GroupDecision,
    GroupOutcome,
    PlannedGroup,
    SampleOutcome,
    fresh_enough,
    judge,
    uninformative,
)
from prorl_envs.rollout.store.base import SPREAD


def group(name: str = "g", samples: int = 4, *rewards: float | None, first: int = 1) -> PlannedGroup:
    """A group with the results of these samples, in order; None is a failure."""
    ended = {
        sample: SampleOutcome(first + sample, reward, "" if reward is not None else "model")
        for sample, reward in enumerate(rewards)
    }
    return PlannedGroup(name, samples, 0, ended)


def rules_of(groups: int, in_flight: int, *, carry: bool = False, **fields: Any) -> BatchRequest:
    on_complete = "carry" if carry else "cancel"
    return BatchRequest.model_construct(groups=groups, in_flight=in_flight, on_complete=on_complete, **fields)


def verdict(rules: BatchRequest, *rewards: float | None, samples: int = 4) -> tuple[GroupOutcome, str] | None:
    judgement = judge(rules, group("g", samples, *rewards))
    return (judgement.verdict, judgement.reason) if judgement else None


ALL = rules_of(groups=1, in_flight=1)
TWO = rules_of(groups=1, in_flight=1, min_rewards=2)
INFORMATIVE = (GroupOutcome.INFORMATIVE, "")


@pytest.mark.parametrize(
    ("rules", "rewards", "expected"),
    [
        (ALL, (0, 1, 1), None),
        (ALL, (0, 1, 1, 1), INFORMATIVE),
        (ALL, (1, 1, 1, 1), (GroupOutcome.UNINFORMATIVE, "equal_rewards")),
        (ALL, (None, 1, None, 0), INFORMATIVE),
        (ALL, (None, None, None, 0), (GroupOutcome.UNINFORMATIVE, "equal_rewards")),
        (ALL, (None, None, None), None),
        (ALL, (None, None, None, None), (GroupOutcome.FAILED, "too_few_rewards")),
        (TWO, (0,), None),
        (TWO, (0, 1), INFORMATIVE),
        (TWO, (1, 1), (GroupOutcome.UNINFORMATIVE, "equal_rewards")),
        (TWO, (None, None, 1), None),
        (TWO, (None, None, 1, 0), INFORMATIVE),
        (TWO, (None, None, None), (GroupOutcome.FAILED, "too_few_rewards")),
        (rules_of(groups=1, in_flight=1, filter=None), (1, 1, 1, 1), INFORMATIVE),
    ],
)
def test_a_group_is_decided_when_its_rewards_suffice(
    rules: BatchRequest, rewards: tuple[float | None, ...], expected: tuple[GroupOutcome, str] | None
) -> None:
    assert verdict(rules, *rewards) == expected


def test_the_bounds_of_the_filter_are_inclusive() -> None:
    bounds = GroupFilter(min_spread=0.5, min_mean=0.25, max_mean=0.75)
    assert uninformative(bounds, [0.0, 0.5]) == ""
    assert uninformative(bounds, [0.5, 1.0]) == ""
    assert uninformative(bounds, [0.0, 0.4]) == "small_spread"
    assert uninformative(bounds, [0.0, 0.0, 0.0, 0.9]) == "low_mean"
    assert uninformative(bounds, [1.0, 1.0, 1.0, 0.1]) == "high_mean"


def test_a_spread_at_the_threshold_is_uninformative() -> None:
    """Rewards whose spread is at most the threshold count as equal."""
    assert uninformative(GroupFilter(), [0.0, SPREAD]) == "equal_rewards"
    assert uninformative(GroupFilter(), [0.0, 2 * SPREAD]) == ""


def test_the_smallest_spread_allows_for_rounding() -> None:
    bounds = GroupFilter(min_spread=0.5)
    assert uninformative(bounds, [0.0, 0.5 - SPREAD]) == ""
    assert uninformative(bounds, [0.0, 0.5 - 2 * SPREAD]) == "small_spread"


def test_the_bounds_of_the_mean_allow_for_rounding() -> None:
    bounds = GroupFilter(min_mean=0.5, max_mean=0.5)
    assert uninformative(bounds, [0.0, 1 - 2 * SPREAD]) == ""
    assert uninformative(bounds, [0.0, 1 - 4 * SPREAD]) == "low_mean"
    assert uninformative(bounds, [0.0, 1 + 2 * SPREAD]) == ""
    assert uninformative(bounds, [0.0, 1 + 4 * SPREAD]) == "high_mean"


def started_plan(rules: BatchRequest, tasks: int, samples: int = 2) -> BatchPlan:
    """A plan whose first groups, named by their indices, have started."""
    plan = BatchPlan(rules)
    plan.add_tasks(tasks, closed=True)
    begin(plan, samples)
    return plan


def begin(plan: BatchPlan, samples: int = 2) -> list[int]:
    indices = list(plan.to_start())
    for index in indices:
        plan.begin(index, PlannedGroup(str(index), samples, 0))
    return indices


def end(plan: BatchPlan, name: str, *rewards: float | None, cursor: int) -> None:
    for sample, reward in enumerate(rewards):
        plan.ended(
            name, sample, SampleOutcome(cursor + sample, reward, "" if reward is not None else "model")
        )


def test_groups_are_counted_by_their_reason_for_exclusion() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=2), tasks=3)
    end(plan, "0", 1, 1, cursor=1)
    end(plan, "1", 0, 0, cursor=3)
    assert plan.reasons == {"equal_rewards": 2}


def test_a_group_without_spread_is_replaced_at_once() -> None:
    plan = started_plan(rules_of(groups=2, in_flight=2), tasks=4)
    end(plan, "0", 1, 1, cursor=1)
    assert begin(plan) == [2]
    end(plan, "1", None, None, cursor=3)
    assert begin(plan) == [3]
    end(plan, "2", 0, 1, cursor=5)
    end(plan, "3", 1, 0, cursor=7)
    assert (plan.state, plan.selected) == (BatchState.COMPLETE, ["2", "3"])
    assert plan.reasons == {"equal_rewards": 1, "too_few_rewards": 1}
    assert plan.failures == {"model": 2}
    assert plan.chosen == [("2", 0), ("2", 1), ("3", 0), ("3", 1)]


def test_a_result_of_an_unknown_group_changes_nothing() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=1), tasks=1)
    assert plan.ended("of another batch", 0, SampleOutcome(1, 1.0)) is None
    assert list(plan.groups) == ["0"] and not plan.decisions


def test_every_decided_group_is_counted() -> None:
    plan = started_plan(rules_of(groups=2, in_flight=3), tasks=3)
    end(plan, "0", 1, 1, cursor=1)
    end(plan, "1", None, None, cursor=3)
    end(plan, "2", 0, 1, cursor=5)
    assert plan.counts == {GroupOutcome.UNINFORMATIVE: 1, GroupOutcome.FAILED: 1, GroupOutcome.INFORMATIVE: 1}


def test_a_cancelled_batch_counts_only_earlier_results() -> None:
    plan = started_plan(rules_of(groups=2, in_flight=2), tasks=2)
    plan.cancel(5)
    plan.cancel(9)
    end(plan, "0", 0, 1, cursor=4)
    end(plan, "1", 0, 1, cursor=6)
    assert plan.selected == ["0"] and plan.undecided == ["1"]


def test_a_group_that_starts_after_the_end_is_not_needed() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=1), tasks=2)
    plan.cancel(5)
    plan.begin(1, PlannedGroup("1", 2, 0))
    assert plan.unneeded() == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    end(plan, "1", 0, 1, cursor=6)
    assert plan.unneeded() == [("0", 0), ("0", 1)]


def test_unknown_groups_cannot_be_carried_over() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=2, carry=True), tasks=2)
    end(plan, "0", 0, 1, cursor=1)
    assert [taken.id for taken in plan.pass_on(["1", "of another batch"])] == ["1"]
    assert list(plan.groups) == ["0"] and not plan.unneeded()


def test_groups_that_the_batch_does_not_need_are_cancelled() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=3), tasks=9)
    end(plan, "2", 0, cursor=1)
    end(plan, "1", 0, 1, cursor=2)
    assert plan.unneeded() == [("0", 0), ("0", 1), ("2", 1)]
    assert not plan.to_start()
    end(plan, "0", 0, 1, cursor=4)  # too late to count
    assert plan.selected == ["1"]
    assert plan.unneeded() == [("2", 1)]


def test_the_samples_that_a_decided_group_does_not_need_are_cancelled() -> None:
    plan = started_plan(rules_of(groups=2, in_flight=1, min_rewards=2), tasks=2, samples=4)
    end(plan, "0", 0, 1, cursor=1)
    assert plan.unneeded() == [("0", 2), ("0", 3)]
    assert plan.state is BatchState.RUNNING
    plan.ended("0", 3, SampleOutcome(3, 1.0))
    assert plan.decisions["0"] == GroupDecision(GroupOutcome.INFORMATIVE, "", (0, 1), (0, 1))
    assert plan.unneeded() == [("0", 2)]


def test_at_most_the_spare_groups_run_beside_the_missing_ones() -> None:
    plan = started_plan(rules_of(groups=3, in_flight=10, max_speculative_groups=1), tasks=99)
    assert len(plan.undecided) == 4
    end(plan, "0", 0, 1, cursor=1)
    assert not plan.to_start(), "two are missing, and three under way"
    end(plan, "1", 1, 1, cursor=3)
    assert list(plan.to_start()) == [4]


def test_leftover_groups_count_for_the_next_batch() -> None:
    plan = started_plan(rules_of(groups=1, in_flight=4, carry=True), tasks=4)
    end(plan, "0", 0, 1, cursor=1)
    assert plan.unneeded() == []
    plan.ended("2", 0, SampleOutcome(3, 0.0))
    end(plan, "3", 1, 0, cursor=4)
    assert [group.id for group in plan.carriable] == ["1", "2", "3"]
    following = BatchPlan(rules_of(groups=2, in_flight=2))
    following.adopt(plan.pass_on(["2", "3"]))
    assert plan.unneeded() == [("1", 0), ("1", 1)], "nobody wants it any more"
    assert plan.carriable == []
    assert following.selected == ["3"]
    following.ended("2", 1, SampleOutcome(6, 1.0))
    assert (following.state, following.selected) == (BatchState.COMPLETE, ["3", "2"])


def test_a_carried_group_is_within_the_cap() -> None:
    old = PlannedGroup("g", 2, 5)
    assert fresh_enough(old, 7, 2)
    assert not fresh_enough(old, 8, 2)
    assert fresh_enough(old, 8, None)
    assert not fresh_enough(PlannedGroup("g", 2, None), 8, 2), "of a version that nobody named"
    assert not fresh_enough(old, None, 2), "for a version that nobody named"


def test_a_cancelled_batch_keeps_earlier_decisions() -> None:
    plan = started_plan(rules_of(groups=2, in_flight=3, carry=True), tasks=9)
    end(plan, "0", 0, 1, cursor=1)
    plan.ended("1", 0, SampleOutcome(3, 0.0))
    plan.cancel(3)
    assert plan.unneeded() == [("1", 1), ("2", 0), ("2", 1)]
    plan.ended("1", 1, SampleOutcome(4, 1.0))
    assert (plan.state, plan.selected, plan.carriable) == (BatchState.CANCELLED, ["0"], [])


def test_a_batch_waits_for_an_open_stream() -> None:
    plan = BatchPlan(rules_of(groups=1, in_flight=1))
    assert plan.waiting_for_tasks
    plan.add_tasks(1, closed=False)
    assert not plan.waiting_for_tasks
    begin(plan)
    end(plan, "0", 1, 1, cursor=1)
    assert (plan.state, plan.waiting_for_tasks) == (BatchState.RUNNING, True)
    plan.add_tasks(0, closed=True)
    assert (plan.state, plan.waiting_for_tasks) == (BatchState.EXHAUSTED, False)


@dataclass
class World:
    """Execute a plan's requests in random order, with independent bookkeeping."""

    plan: BatchPlan
    samples: int
    chance: random.Random
    rewards: list[list[float | None]]  # of the samples of each task
    cursor: int = 0
    history: list[tuple[str, int, SampleOutcome]] = field(default_factory=list)
    carried: int = 0

    def pending(self) -> list[tuple[str, int]]:
        return [(g.id, sample) for g in self.plan.groups.values() for sample in g.pending]

    def step(self) -> None:
        chance, plan = self.chance, self.plan
        if plan.tasks < len(self.rewards) and chance.random() < 0.3:
            count = chance.randint(1, len(self.rewards) - plan.tasks)
            plan.add_tasks(count, closed=plan.tasks + count == len(self.rewards))
        before = len(plan.undecided)
        started = begin(plan, self.samples)
        assert before + len(started) <= max(before, plan.rules.in_flight or 0)
        if plan.rules.max_speculative_groups is not None:
            missing = plan.rules.groups - len(plan.selected)
            assert before + len(started) <= max(before, missing + plan.rules.max_speculative_groups)
        if pending := self.pending():
            name, sample = chance.choice(pending)
            self.end(name, sample, cancelled=(name, sample) in plan.unneeded() and chance.random() < 0.7)
        self.check()

    def end(self, name: str, sample: int, *, cancelled: bool) -> None:
        self.cursor += 1
        reward = None if cancelled else self.rewards[int(name)][sample]
        failure = "cancelled" if cancelled else "" if reward is not None else "model"
        ended = SampleOutcome(self.cursor, reward, failure)
        self.history.append((name, sample, ended))
        self.plan.ended(name, sample, ended)
        self.plan.ended(
            name, sample, SampleOutcome(self.cursor + 1000, 0.5)
        )  # an unknown one changes nothing

    def check(self) -> None:
        plan, rules = self.plan, self.plan.rules
        undecided, unneeded = set(plan.undecided), plan.unneeded()
        assert len(undecided) <= max(rules.in_flight or 0, self.carried)
        assert len(plan.selected) <= rules.groups
        assert undecided.isdisjoint(plan.decisions)
        assert undecided | set(plan.decisions) == set(plan.groups)
        assert len(unneeded) == len(set(unneeded))
        assert set(unneeded) <= set(self.pending()), "only what has not ended is cancelled"
        if plan.state is BatchState.RUNNING or plan.carriable:
            assert undecided.isdisjoint(name for name, _ in unneeded), "needed, and cancelled"
        for name in plan.selected:
            rewards = plan.decisions[name].rewards
            assert len(rewards) >= (min(rules.min_rewards, self.samples) if rules.min_rewards else 1)
            assert rules.filter is None or len(set(rewards)) > 1

    def replayed(self) -> BatchPlan:
        """Return the decisions that another service would make from the stored data alone."""
        again = BatchPlan(self.plan.rules)
        again.add_tasks(self.plan.tasks, closed=self.plan.closed)
        shuffled = list(self.plan.groups.values())
        self.chance.shuffle(shuffled)
        for one in shuffled:
            again.begin(int(one.id), PlannedGroup(one.id, one.samples, one.weight_version))
        again.replay(shuffled)
        return again


rules = st.builds(
    rules_of,
    groups=st.integers(1, 4),
    in_flight=st.integers(1, 6),
    max_speculative_groups=st.none() | st.integers(0, 3),
    min_rewards=st.none() | st.integers(1, 3),
    filter=st.sampled_from([None, GroupFilter()]),
    carry=st.booleans(),
)
outcomes = st.lists(st.sampled_from([0.0, 1.0, 1.0, None]), min_size=3, max_size=3)


@given(rules, st.lists(outcomes, min_size=1, max_size=12), st.integers(0, 2**32))
def test_any_order_reaches_the_target_if_it_can_be_reached(
    rules: BatchRequest, rewards: list[list[float | None]], seed: int
) -> None:
    world = World(BatchPlan(rules), 3, random.Random(seed), rewards)
    while not (world.plan.state.over and not world.pending()):
        world.step()
    plan = world.plan
    informative = sum(verdict(rules, *row, samples=3) == INFORMATIVE for row in rewards)
    if rules.min_rewards is None:  # otherwise the order decides
        assert (plan.state is BatchState.COMPLETE) == (informative >= rules.groups)
        assert len(plan.selected) == min(informative, rules.groups)
    assert (plan.state is BatchState.COMPLETE) == (len(plan.selected) == rules.groups)
    if plan.state is BatchState.EXHAUSTED:
        assert plan.started == len(rewards)
    assert plan.unneeded() == []


@given(rules, st.lists(outcomes, min_size=1, max_size=12), st.integers(0, 2**32), st.data())
def test_a_plan_rebuilt_from_the_store_has_decided_the_same(
    rules: BatchRequest, rewards: list[list[float | None]], seed: int, data: st.DataObject
) -> None:
    world = World(BatchPlan(rules), 3, random.Random(seed), rewards)
    for _ in range(data.draw(st.integers(0, 40))):
        world.step()
    again, plan = world.replayed(), world.plan
    assert again.selected == plan.selected
    assert again.decisions == plan.decisions
    assert sorted(again.undecided) == sorted(plan.undecided)
    assert sorted(again.unneeded()) == sorted(plan.unneeded())
    assert (again.state, again.to_start()) == (plan.state, plan.to_start())
    assert sorted(group.id for group in again.carriable) == sorted(group.id for group in plan.carriable)


@given(
    rules,
    rules,
    st.lists(outcomes, min_size=1, max_size=10),
    st.integers(0, 2**32),
    st.none() | st.integers(0, 2),
    st.integers(0, 4),
)
def test_carried_groups_are_within_the_cap_and_in_one_batch_only(
    first: BatchRequest,
    second: BatchRequest,
    rewards: list[list[float | None]],
    seed: int,
    cap: int | None,
    version: int,
) -> None:
    world = World(BatchPlan(first), 3, random.Random(seed), rewards)
    while not world.plan.state.over:
        world.step()
    for _ in range(3):
        world.step()  # leftover groups continue
    leftover = world.plan.carriable
    taken = [group.id for group in leftover if fresh_enough(group, version, cap)]
    assert cap is None or version <= cap or not taken, "they began at version 0"
    following = World(BatchPlan(second), 3, world.chance, rewards, world.cursor, carried=len(taken))
    following.plan.add_tasks(0, closed=True)
    following.plan.adopt(world.plan.pass_on(taken))
    assert set(world.plan.groups).isdisjoint(following.plan.groups)
    assert set(following.plan.groups) == set(taken)
    dropped = {group.id for group in leftover} - set(taken)
    assert {name for name, _ in world.plan.unneeded()} >= {
        g.id for g in leftover if g.id in dropped and g.pending
    }
    while following.pending():
        name, sample = following.chance.choice(following.pending())
        following.end(name, sample, cancelled=False)
        following.check()
    assert following.plan.state in (BatchState.COMPLETE, BatchState.EXHAUSTED)
    assert set(following.plan.selected).isdisjoint(world.plan.selected), "no group twice"
