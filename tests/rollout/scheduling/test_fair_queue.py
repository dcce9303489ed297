"""The queue without a service: priorities, shares by weight, and no advantage from pausing."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.scheduling.fair_queue import FairQueue, Share
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.rollout.scheduling.scheduler import Close, Finish, Scheduler, Start

weights = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0]), min_size=2, max_size=5)


def fill(queue: FairQueue, lanes: dict[str, Share], jobs: int) -> None:
    for name, share in lanes.items():
        for i in range(jobs):
            queue.push(f"{name}/{i}", f"{name}/{i // 8}", share)


def test_a_lane_of_twice_the_weight_is_served_twice_as_often() -> None:
    queue = FairQueue()
    fill(queue, {"a": Share("a", 1.0), "b": Share("b", 2.0)}, 100)
    served = Counter(queue.pop()[0] for _ in range(60))
    assert served == {"a": 20, "b": 40}


def test_a_higher_priority_goes_first() -> None:
    queue = FairQueue()
    fill(queue, {"low": Share("low", 100.0, -1), "high": Share("high", 0.01, 5), "none": Share()}, 3)
    assert [queue.pop().partition("/")[0] for _ in range(9)] == ["high"] * 3 + ["none"] * 3 + ["low"] * 3
    assert len(queue) == 0


def test_within_a_lane_groups_stay_whole() -> None:
    queue = FairQueue(turn=8)
    fill(queue, {"a": Share("a"), "b": Share("b")}, 16)
    order = [queue.pop() for _ in range(32)]
    assert [job for job in order if job[0] == "a"] == [f"a/{i}" for i in range(16)]
    assert [job for job in order if job[0] == "b"] == [f"b/{i}" for i in range(16)]


def test_a_lane_with_one_job_at_a_time_is_not_served_before_its_turn() -> None:
    queue = FairQueue()
    fill(queue, {"busy": Share("busy"), "other": Share("other")}, 50)
    served: Counter[str] = Counter()
    queue.push("single/0", "single/0", Share("single", 0.5))
    for i in range(1, 51):
        lane = queue.pop().partition("/")[0]
        served[lane] += 1
        if lane == "single":
            queue.push(f"single/{i}", f"single/{i}", Share("single", 0.5))
    assert served["single"] == 10, "a fifth, though its lane was empty after each job"


def test_a_lane_that_joins_late_gets_no_compensation() -> None:
    queue = FairQueue()
    fill(queue, {"a": Share("a")}, 100)
    for _ in range(50):
        queue.pop()
    fill(queue, {"b": Share("b")}, 100)
    assert Counter(queue.pop()[0] for _ in range(20)) == {"a": 10, "b": 10}


@given(weights, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=60))
def test_waiting_lanes_are_served_by_weight_whatever_others_do(
    sizes: list[float], others: list[tuple[int, int]]
) -> None:
    """For two lanes that always have waiting work, in any interval, the served jobs over weight differ by
    less than one job of each."""
    queue = FairQueue()
    lanes = {str(i): Share(str(i), weight) for i, weight in enumerate(sizes)}
    fill(queue, lanes, 400)
    served: Counter[str] = Counter()
    history = [Counter(served)]
    for step, (lane, count) in enumerate(others):
        for i in range(count % 4):
            queue.push(f"x{lane}/{step}-{i}", f"x{lane}", Share(f"x{lane}", 1.0 + lane))
        for _ in range(1 + count % 5):
            served[queue.pop().partition("/")[0]] += 1
            history.append(Counter(served))
    for begin in history[::7]:
        for f, share_f in lanes.items():
            for g, share_g in lanes.items():
                got_f = (served[f] - begin[f]) / share_f.weight
                got_g = (served[g] - begin[g]) / share_g.weight
                assert abs(got_f - got_g) <= 1 / share_f.weight + 1 / share_g.weight + 1e-6


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-1, 1), st.sampled_from([1.0, 2.0]), st.booleans()),
        max_size=80,
    )
)
def test_no_job_is_lost_and_no_lower_priority_goes_first(
    steps: list[tuple[int, int, float, bool]],
) -> None:
    queue = FairQueue(turn=3)
    waiting: dict[str, tuple[str, Share]] = {}
    for number, (lane, priority, weight, push) in enumerate(steps):
        if push or not waiting:
            share = Share(str(lane), weight, priority)
            waiting[str(number)] = (f"{lane}", share)
            queue.push(str(number), f"{lane}", share)
        elif number % 3 == 0:
            job, (group, share) = next(iter(waiting.items()))
            queue.remove(job, group, share)
            del waiting[job]
        else:
            highest = max(share.priority for _, share in waiting.values())
            assert waiting.pop(queue.pop())[1].priority == highest
        assert len(queue) == len(waiting)
    while waiting:
        del waiting[queue.pop()]
    assert len(queue) == 0


def test_the_scheduler_serves_every_stage_by_share() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=8))
    order: list[str] = []
    heavy, light = Share("heavy", 3.0), Share("light", 1.0)
    decisions = scheduler.submit([(f"h{i}", "h") for i in range(12)], share=heavy)
    decisions += scheduler.submit([(f"l{i}", "l") for i in range(12)], share=light)
    urgent = scheduler.submit([("u", "u")], share=Share("urgent", 1.0, 1))
    assert urgent == []
    todo = list(decisions)
    while todo:
        match todo.pop(0):
            case Start(job, stage, _):
                if stage is Stage.INIT:
                    order.append(job)
                todo += scheduler.ended(job)
            case Finish(_, state):
                assert state is JobState.DONE
            case Close(job):
                todo += scheduler.closed(job)
            case other:
                pytest.fail(f"nobody asked for {other}")
    assert order[1] == "u", "the one that waits with a higher priority"
    assert Counter(job[0] for job in order[2:14]) == {"h": 9, "l": 3}


def test_removing_a_waiting_group_does_not_extend_the_turn_of_the_first() -> None:
    queue = FairQueue(turn=2)
    for job in ("a0", "a1", "a2", "b0", "c0"):
        queue.push(job, job[0])
    assert queue.pop() == "a0"
    queue.remove("b0", "b")
    assert [queue.pop() for _ in range(3)] == ["a1", "c0", "a2"]
