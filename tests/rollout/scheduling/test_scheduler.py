"""The scheduler without a service: stages to start and to stop; no job is ever lost."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.config import ServiceSettings
from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.scheduling.fair_queue import FairQueue
from prorl_envs.rollout.scheduling.placement import HERE, NodeRecord, StageLimits, least_loaded
from prorl_envs.rollout.scheduling.scheduler import (
    AdmitExternal,
    Close,
    Decision,
    Finish,
    Interrupt,
    Scheduler,
    Start,
)

WIDE = StageLimits(init=2, run=4, eval=2, max_jobs_with_sandbox=8)


def starts(decisions: list[Decision]) -> list[tuple[str, Stage]]:
    return [(d.job, d.stage) for d in decisions if isinstance(d, Start)]


def test_a_job_runs_its_stages_and_is_finished_before_it_is_closed() -> None:
    scheduler = Scheduler(WIDE)
    assert scheduler.submit([("a", "g")]) == [Start("a", Stage.INIT, 1)]
    assert scheduler.ended("a") == [Start("a", Stage.RUN, 1)]
    assert scheduler.ended("a") == [Start("a", Stage.EVAL, 1)]
    assert scheduler.ended("a") == [Finish("a", JobState.DONE, Stage.EVAL), Close("a")]
    assert scheduler.jobs_with_sandbox == 1
    assert scheduler.closed("a") == []
    assert len(scheduler) == 0
    assert scheduler.jobs_with_sandbox == 0


def test_stages_overlap() -> None:
    """One job is graded while the next runs and a third is prepared."""
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=3))
    scheduler.submit([("a", "g"), ("b", "g"), ("c", "g")])
    scheduler.ended("a")
    scheduler.ended("b")
    scheduler.ended("a")
    assert scheduler.active == {Stage.INIT: 1, Stage.RUN: 1, Stage.EVAL: 1}
    assert [scheduler.state(job) for job in "abc"] == [JobState.EVAL, JobState.RUN, JobState.INIT]


def test_no_limit_exceeds_the_sandboxes_that_the_machine_allows() -> None:
    scheduler = Scheduler(WIDE, max_sandboxes=2)
    assert scheduler.max_jobs_with_sandbox == 2
    scheduler.submit([(str(i), "g") for i in range(5)])
    assert (scheduler.jobs_with_sandbox, scheduler.waiting[Stage.INIT]) == (2, 3)
    scheduler.resize(WIDE)
    assert scheduler.max_jobs_with_sandbox == 2


def test_a_slow_eval_holds_no_run_slot() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=10))
    scheduler.submit([(str(i), "g") for i in range(5)])
    for job in "0123":  # "0" stays in EVAL; the others pass through RUN behind it
        scheduler.ended(job)
        scheduler.ended(job)
    assert scheduler.active[Stage.EVAL] == 1
    assert scheduler.waiting[Stage.EVAL] == 3
    assert scheduler.state("4") is JobState.INIT


def test_initialised_jobs_do_not_pile_up_in_front_of_a_slow_run() -> None:
    scheduler = Scheduler(StageLimits(init=4, run=1, eval=4, max_jobs_with_sandbox=6))
    decisions = scheduler.submit([(str(i), "g") for i in range(100)])
    while pending := [job for job, stage in starts(decisions) if stage is Stage.INIT]:
        decisions = [d for job in pending for d in scheduler.ended(job)]
    assert scheduler.active == {Stage.INIT: 0, Stage.RUN: 1, Stage.EVAL: 0}
    assert scheduler.waiting[Stage.RUN] == 5
    assert scheduler.jobs_with_sandbox == 6
    assert scheduler.waiting[Stage.INIT] == 94


def test_a_group_is_served_whole_and_a_large_one_lets_others_in() -> None:
    queue = FairQueue(turn=4)
    for i in range(10):
        queue.push(f"large{i}", "large")
    for group in ("b", "c"):
        for i in range(3):
            queue.push(f"{group}{i}", group)
    order = [queue.pop() for _ in range(16)]
    assert order == [
        *(f"large{i}" for i in range(4)),
        *("b0", "b1", "b2", "c0", "c1", "c2"),
        *(f"large{i}" for i in range(4, 10)),
    ]
    assert len(queue) == 0


def test_removing_the_group_in_turn_starts_a_new_turn() -> None:
    queue = FairQueue(turn=2)
    for job, group in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b"), ("c0", "c")):
        queue.push(job, group)
    assert queue.pop() == "a0"
    queue.remove("a1", "a")
    assert [queue.pop(), queue.pop(), queue.pop()] == ["b0", "b1", "c0"]


def test_a_queued_job_is_cancelled_without_anything_to_close() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=1))
    scheduler.submit([("a", "g"), ("b", "g")])
    assert scheduler.cancel("b") == [Finish("b", JobState.CANCELLED, Stage.INIT)]
    assert "b" not in scheduler


def test_a_running_job_is_cancelled_at_once_and_closed_when_its_stage_has_stopped() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    assert scheduler.cancel("a") == [Finish("a", JobState.CANCELLED, Stage.INIT), Interrupt("a")]
    assert scheduler.state("a") is None
    assert scheduler.cancel("a") == []
    assert scheduler.ended("a") == [Close("a")]
    scheduler.closed("a")
    assert len(scheduler) == 0


def test_a_job_that_waits_between_stages_is_cancelled_and_closed() -> None:
    scheduler = Scheduler(StageLimits(init=2, run=1, eval=1, max_jobs_with_sandbox=3))
    scheduler.submit([("a", "g"), ("b", "g")])
    scheduler.ended("a")
    scheduler.ended("b")
    assert scheduler.cancel("b") == [Finish("b", JobState.CANCELLED, Stage.RUN), Close("b")]
    assert scheduler.waiting[Stage.RUN] == 0


def test_a_stage_that_fails_after_its_cancellation_is_not_a_second_result() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    scheduler.cancel("a")
    assert scheduler.failed("a", retryable=True) == [Close("a")]


def test_a_retry_waits_for_the_old_sandbox_to_be_closed() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    assert scheduler.failed("a", retryable=True) == [Close("a")]
    assert scheduler.closed("a") == [Start("a", Stage.INIT, 2)]
    assert scheduler.failed("a", retryable=True) == [Finish("a", JobState.FAILED, Stage.INIT), Close("a")]


def test_a_job_can_be_cancelled_between_two_attempts() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    scheduler.failed("a", retryable=True)
    assert scheduler.cancel("a") == [Finish("a", JobState.CANCELLED, Stage.INIT)]
    assert scheduler.closed("a") == []
    assert len(scheduler) == 0


def test_a_paused_scheduler_takes_jobs_and_starts_no_stage() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    assert scheduler.pause(Pause.HOLD) == []
    assert scheduler.submit([("b", "g")]) == []
    assert scheduler.ended("a") == [], "its stage ends, and the next one waits"
    assert scheduler.waiting == {Stage.INIT: 1, Stage.RUN: 1, Stage.EVAL: 0}
    assert scheduler.cancel("b") == [Finish("b", JobState.CANCELLED, Stage.INIT)]
    assert scheduler.resume() == [Start("a", Stage.RUN, 1)]
    assert scheduler.paused is None


def test_a_finishing_pause_holds_back_only_jobs_that_have_not_started() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g"), ("b", "g")])
    scheduler.pause(Pause.HOLD)
    scheduler.ended("a")
    assert scheduler.pause(Pause.FINISH) == [Start("a", Stage.RUN, 1)], "from one pause into the other"
    assert scheduler.submit([("c", "g")]) == []
    assert scheduler.failed("b", retryable=True) == [Close("b")]
    assert scheduler.closed("b") == [], "another attempt is a beginning"
    assert scheduler.ended("a") == [Start("a", Stage.EVAL, 1)]
    assert starts(scheduler.resume()) == [("c", Stage.INIT), ("b", Stage.INIT)]


def test_raised_limits_start_waiting_jobs_and_lowered_ones_stop_none() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=2))
    scheduler.submit([(job, "g") for job in "abcd"])
    scheduler.ended("a")
    assert scheduler.jobs_with_sandbox == 2
    wider = scheduler.resize(StageLimits(init=4, run=2, eval=1, max_jobs_with_sandbox=4, attempts=1))
    assert starts(wider) == [("c", Stage.INIT), ("d", Stage.INIT)]
    assert starts(scheduler.ended("b")) == [("b", Stage.RUN)]
    assert scheduler.resize(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=1)) == []
    assert scheduler.active == {Stage.INIT: 2, Stage.RUN: 2, Stage.EVAL: 0}
    assert scheduler.submit([("e", "g")]) == [], "there is no room until the others are gone"
    scheduler.pause(Pause.HOLD)
    assert scheduler.resize(WIDE) == []


def test_an_external_episode_shares_the_limits_and_precedes_waiting_jobs() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=2))
    scheduler.submit([("a", "g"), ("b", "g")])
    assert scheduler.reserve("x") == [], "INIT is taken"
    with pytest.raises(ValueError, match="exists already"):
        scheduler.reserve("x")
    assert scheduler.ended("a") == [Start("a", Stage.RUN, 1), AdmitExternal("x")]
    assert (scheduler.jobs_with_sandbox, scheduler.active[Stage.INIT]) == (2, 1)
    assert scheduler.prepared("x") == [], "INIT is free, and nothing else"
    with pytest.raises(ValueError, match="prepared already"):
        scheduler.prepared("x")
    assert scheduler.release("x") == [Start("b", Stage.INIT, 1)]
    assert scheduler.release("x") == []


def test_an_external_episode_that_leaves_early_releases_everything() -> None:
    scheduler = Scheduler(StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=1))
    assert scheduler.reserve("x") == [AdmitExternal("x")]
    with pytest.raises(ValueError, match="exists already"):
        scheduler.reserve("x")
    assert scheduler.reserve("y") == []
    scheduler.submit([("a", "g")])
    assert scheduler.release("y") == []
    assert scheduler.release("x") == [Start("a", Stage.INIT, 1)]
    assert scheduler.jobs_with_sandbox == 1


def test_a_paused_scheduler_admits_no_external_episode() -> None:
    scheduler = Scheduler(WIDE)
    for mode in Pause:
        scheduler.pause(mode)
        assert scheduler.reserve(mode) == []
    assert scheduler.resume() == [AdmitExternal(mode) for mode in Pause]


def test_attempts_that_failed_under_an_earlier_scheduler_count() -> None:
    scheduler = Scheduler(WIDE)
    assert scheduler.submit([("a", "g"), ("b", "g")], {"a": 1}) == [
        Start("a", Stage.INIT, 2),
        Start("b", Stage.INIT, 1),
    ]
    assert scheduler.failed("a", retryable=True) == [Finish("a", JobState.FAILED, Stage.INIT), Close("a")]
    assert scheduler.failed("b", retryable=True) == [Close("b")]


def test_impossible_events_raise_errors() -> None:
    scheduler = Scheduler(WIDE)
    scheduler.submit([("a", "g")])
    with pytest.raises(ValueError, match="already"):
        scheduler.submit([("a", "g")])
    with pytest.raises(ValueError, match="not closing"):
        scheduler.closed("a")
    scheduler.ended("a")
    scheduler.ended("a")
    scheduler.ended("a")
    with pytest.raises(ValueError, match="not in a stage"):
        scheduler.ended("a")


def nodes(**live: int) -> Scheduler:
    """Return a scheduler for nodes on other machines, with a number of slots for each."""
    scheduler = Scheduler(WIDE, here=False)
    for name, count in live.items():
        assert (
            scheduler.join(name, StageLimits(init=count, run=count, eval=count, max_jobs_with_sandbox=count))
            == []
        )
    return scheduler


def placed(decisions: list[Decision]) -> dict[str, str]:
    return {d.job: d.node for d in decisions if isinstance(d, Start)}


def test_jobs_go_to_the_node_with_most_room_for_its_size() -> None:
    scheduler = nodes(small=2, large=4)
    started = placed(scheduler.submit([(str(i), "g") for i in range(7)]))
    assert Counter(started.values()) == {"small": 2, "large": 4}
    assert [started[job] for job in "012"] == ["small", "large", "large"], "alike in proportion"
    assert scheduler.waiting[Stage.INIT] == 1
    assert (scheduler.max_jobs_with_sandbox, scheduler.limit(Stage.RUN)) == (6, 6)


def test_an_attempt_stays_on_its_node_and_the_next_one_goes_to_another() -> None:
    scheduler = nodes(a=1, b=1)
    [first] = placed(scheduler.submit([("x", "g")])).values()
    assert set(placed(scheduler.ended("x")).values()) == {first}
    scheduler.failed("x", retryable=True)
    [second] = placed(scheduler.closed("x")).values()
    assert {first, second} == {"a", "b"}
    alone = nodes(a=1)
    alone.submit([("x", "g")])
    alone.failed("x", retryable=True)
    assert placed(alone.closed("x")) == {"x": "a"}, "where there is no other"


def test_the_next_attempt_avoids_its_node_even_if_that_has_most_room() -> None:
    scheduler = nodes(small=2, large=4)
    first = placed(scheduler.submit([(job, "g") for job in "xyz"]))
    failed = next(job for job, node in first.items() if node == "large")
    scheduler.failed(failed, retryable=True)
    room = {
        record.name: record.jobs_with_sandbox / record.limits.max_jobs_with_sandbox
        for record in scheduler.nodes
    }
    assert placed(scheduler.closed(failed)) == {failed: "small"}
    assert room["large"] <= room["small"], "or this shows nothing"


def test_jobs_wait_for_the_first_node_and_a_late_one_gets_work_at_once() -> None:
    scheduler = nodes()
    assert scheduler.submit([("x", "g"), ("y", "g"), ("z", "g")]) == []
    assert placed(scheduler.join("a", StageLimits(init=1, run=1, eval=1, max_jobs_with_sandbox=2))) == {
        "x": "a"
    }
    late = StageLimits(init=2, run=2, eval=2, max_jobs_with_sandbox=2)
    assert placed(scheduler.join("b", late)) == {"y": "b", "z": "b"}
    with pytest.raises(ValueError, match="exists already"):
        scheduler.join("a", WIDE)


def test_a_drained_node_finishes_its_jobs() -> None:
    scheduler = nodes(a=2)
    scheduler.submit([("x", "g")])
    assert scheduler.admit("a", jobs=False) == []
    assert scheduler.submit([("y", "g")]) == []
    assert placed(scheduler.ended("x")) == {"x": "a"}, "RUN, where its sandbox is"
    assert placed(scheduler.admit("a", jobs=True)) == {"y": "a"}


def test_jobs_of_a_lost_node_are_repeated_elsewhere() -> None:
    scheduler = Scheduler(WIDE, here=False)
    scheduler.join("a", StageLimits(init=2, run=1, eval=1, max_jobs_with_sandbox=2))
    scheduler.submit([("x", "g"), ("y", "g")])
    scheduler.ended("x")
    scheduler.ended("y")
    scheduler.join("b", WIDE)
    assert scheduler.waiting_on("a") == ["y"]
    assert scheduler.lost("a") == [Close("y")]
    assert scheduler.closed("y") == [Start("y", Stage.INIT, 2, "b")]
    assert scheduler.failed("x", retryable=True) == [Close("x")]
    assert scheduler.closed("x") == [Start("x", Stage.INIT, 2, "b")]
    assert [record.jobs_with_sandbox for record in scheduler.nodes] == [0, 2]


def test_a_stage_that_stopped_while_its_node_was_lost_fails_with_the_next() -> None:
    scheduler = nodes(a=1)
    scheduler.submit([("x", "g")])
    scheduler.pause(Pause.HOLD)
    scheduler.lost("a")
    assert scheduler.ended("x") == [Start("x", Stage.RUN, 1, "a")], "there is nobody to hold it"
    assert scheduler.failed("x", retryable=True) == [Close("x")]
    assert scheduler.closed("x") == []
    assert len(scheduler) == 1


def test_external_episodes_run_on_any_node_unless_they_must_run_on_the_head() -> None:
    scheduler = nodes(a=1)
    assert scheduler.reserve("x") == [AdmitExternal("x", "a")]
    assert scheduler.reserve("waits") == [], "this machine takes no jobs"
    assert scheduler.reserve("y", here=True) == [AdmitExternal("y", HERE)]
    assert [(record.name, record.jobs_with_sandbox) for record in scheduler.nodes] == [(HERE, 1), ("a", 1)]
    assert scheduler.prepared("x") == []
    assert scheduler.release("x") == [AdmitExternal("waits", "a")]
    scheduler.lost("a")
    assert scheduler.release("waits") == []
    assert [(record.name, record.jobs_with_sandbox) for record in scheduler.nodes] == [(HERE, 1)]


def test_many_nodes_fill_evenly() -> None:
    records = [NodeRecord(str(number), WIDE) for number in range(100)]
    for _ in range(400):
        record = least_loaded(records)
        assert record is not None
        record.jobs_with_sandbox += 1
    assert {record.jobs_with_sandbox for record in records} == {4}


def test_the_node_to_avoid_is_chosen_only_if_no_other_has_room() -> None:
    a, b = records = [NodeRecord(name, WIDE) for name in ("a", "b")]
    b.jobs_with_sandbox = 4
    assert least_loaded(records) is a
    assert least_loaded(records, avoid="a") is b
    assert least_loaded(records, avoid="b") is a
    b.open = False
    assert least_loaded(records, avoid="a") is a
    assert least_loaded([b]) is None


def test_the_limit_of_environments_is_by_default_the_sum_of_the_stages() -> None:
    settings = ServiceSettings(init=2, run=3, eval=4, attempts=5)
    assert StageLimits.of_settings(settings) == StageLimits(
        init=2, run=3, eval=4, max_jobs_with_sandbox=9, attempts=5
    )
    fewer = StageLimits.of_settings(settings.model_copy(update={"max_jobs_with_sandbox": 6}))
    assert fewer.max_jobs_with_sandbox == 6
    assert [fewer.of(stage) for stage in Stage] == [2, 3, 4]


def test_a_job_that_waits_between_stages_counts_for_the_next_one() -> None:
    scheduler = Scheduler(StageLimits(init=2, run=1, eval=1, max_jobs_with_sandbox=4))
    scheduler.submit([("a", "g"), ("b", "g"), ("c", "g")])
    scheduler.ended("a")
    scheduler.ended("b")
    assert scheduler.waiting[Stage.RUN] == 1
    assert [scheduler.state(job) for job in ("a", "b", "c")] == [JobState.RUN, JobState.RUN, JobState.INIT]
    scheduler.submit([("d", "g"), ("e", "g")])
    assert scheduler.state("e") is JobState.QUEUED and scheduler.state("unknown") is None


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StageLimits(init=1, run=0, eval=1, max_jobs_with_sandbox=1)


@dataclass
class World:
    """Execute decisions in random order with independent bookkeeping."""

    limits: StageLimits
    chance: random.Random
    scheduler: Scheduler = field(init=False)
    running: dict[str, Stage] = field(default_factory=dict)
    closing: set[str] = field(default_factory=set)
    finished: dict[str, JobState] = field(default_factory=dict)
    stages: defaultdict[str, list[tuple[int, Stage]]] = field(default_factory=lambda: defaultdict(list))
    most: Counter[str] = field(default_factory=Counter)
    guests: dict[str, bool] = field(default_factory=dict)  # by name, whether still in INIT
    tied: set[str] = field(default_factory=set)  # guests that must run on this machine
    invited: int = 0
    nodes: dict[str, StageLimits] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    at: dict[str, str] = field(default_factory=dict)  # by job, the node of its last attempt
    joined: int = 0
    held: dict[str, set[str]] = field(default_factory=dict)  # by group, jobs that wait for the trunk
    origins: dict[str, str] = field(default_factory=dict)  # by group, the node where the trunk branched

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.nodes[HERE] = self.limits

    def apply(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Start(job, stage, attempt, node):
                    group = job.partition("/")[0]
                    assert job not in self.held.get(group, ()), "started before its trunk branched"
                    assert stage is Stage.INIT or self.at[job] == node, "moved within an attempt"
                    if stage is Stage.INIT and (origin := self.origins.get(group)) in self.nodes:
                        assert node == origin, "started without its checkpoint"
                    elif stage is Stage.INIT:
                        assert node in self.nodes and node not in self.drained
                    self.at[job] = node
                    if node not in self.nodes:  # lost while the previous stage stopped: this fails at once
                        self.stages[job].append((attempt, stage))
                        self.running[job] = stage
                        continue
                    assert self.scheduler.paused is not Pause.HOLD
                    assert not (self.scheduler.paused and stage is Stage.INIT)
                    assert job not in self.running, "two stages at once"
                    assert job not in self.finished, "started after its end"
                    twice = (attempt, stage) in self.stages[job]
                    assert not twice or (stage is Stage.RUN and group in self.origins), "one stage twice"
                    self.stages[job].append((attempt, stage))
                    self.running[job] = stage
                case Interrupt(job):
                    assert job in self.running
                case Finish(job, state, _):
                    assert job not in self.finished, "finished twice"
                    self.finished[job] = state
                    self.release(job)
                case AdmitExternal(guest, node):
                    assert node in self.nodes and (guest not in self.tied or node == HERE)
                    assert guest in self.tied or node not in self.drained
                    self.at[guest] = node
                    assert self.scheduler.paused is None
                    assert guest not in self.guests, "let in twice"
                    self.guests[guest] = True
                case Close(job):
                    assert job not in self.running, "closed while a stage runs"
                    assert job not in self.closing, "closed twice"
                    self.closing.add(job)
        self.check()

    def check(self) -> None:
        for record in self.scheduler.nodes:
            self.check_node(record)
        held = sum(len(jobs) for jobs in self.held.values())
        at_origin = sum(len(record.queues[Stage.INIT]) for record in self.scheduler.nodes)
        assert held + at_origin <= self.scheduler.waiting[Stage.INIT]
        if self.scheduler.waiting[Stage.INIT] > held + at_origin and not self.scheduler.paused:
            assert not any(record.open and record.room for record in self.scheduler.nodes), (
                "room, and one waits"
            )

    def check_node(self, record: NodeRecord) -> None:
        limits = self.nodes[record.name]
        guests = {name: init for name, init in self.guests.items() if self.at[name] == record.name}
        active = Counter(stage for job, stage in self.running.items() if self.at[job] == record.name)
        active[Stage.INIT] += sum(guests.values())
        for stage in Stage:
            assert active[stage] <= limits.of(stage)
            assert active[stage] == record.active[stage]
            self.most[stage] = max(self.most[stage], active[stage])
        held = {job for job in (*self.running, *self.closing) if self.at[job] == record.name}
        held |= set(guests)
        assert len(held) <= record.jobs_with_sandbox <= limits.max_jobs_with_sandbox
        if self.scheduler.paused is Pause.HOLD:
            return
        if record.queues[Stage.INIT]:
            assert not record.room or self.scheduler.paused
        for stage in (Stage.RUN, Stage.EVAL):
            queue = record.queues[stage]
            assert not queue or active[stage] == limits.of(stage), "a free slot beside a waiting job"

    def submit(self, group: str, size: int, *, branches: bool) -> None:
        jobs = [(f"{group}/{i}", group) for i in range(size)]
        held = {job for job, _ in jobs[1:]} if branches else set()
        self.held[group] = set(held)
        self.apply(self.scheduler.submit(jobs, held=held))

    def release(self, job: str) -> None:
        """Note that a job has finished or left RUN: if it is a trunk, it holds no other job any more."""
        group, _, number = job.partition("/")
        if number == "0":
            self.held.pop(group, None)
        else:
            self.held.get(group, set()).discard(job)

    def step(self) -> None:
        """Make one random event happen."""
        if self.chance.random() < 0.1:
            mode = self.chance.choice([None, *Pause])
            self.apply(self.scheduler.resume() if mode is None else self.scheduler.pause(mode))
        if self.chance.random() < 0.2:
            self.visit()
        if self.chance.random() < 0.15:
            self.change_nodes()
        jobs = [*self.running, *self.closing]
        if not jobs:  # paused
            return
        job = self.chance.choice(jobs)
        if job in self.closing:
            self.closing.discard(job)
            self.apply(self.scheduler.closed(job))
            return
        if self.chance.random() < 0.1:
            self.apply(self.scheduler.cancel(job))
            return
        del self.running[job]
        if self.at[job] not in self.nodes:
            self.apply(self.scheduler.failed(job, retryable=True))
        elif self.chance.random() < 0.25:
            self.apply(self.scheduler.failed(job, retryable=self.chance.random() < 0.5))
        else:
            self.end(job)

    def end(self, job: str) -> None:
        """End a stage, or interrupt a trunk's RUN by a checkpoint."""
        group = job.partition("/")[0]
        is_trunk = job.endswith("/0") and self.stages[job][-1][1] is Stage.RUN
        if is_trunk and self.held.get(group) and self.chance.random() < 0.8:
            if job not in self.finished:
                self.origins[group] = self.at[job]
                self.release(job)
            self.apply(self.scheduler.branched(job))
            return
        if is_trunk:
            self.release(job)
        self.apply(self.scheduler.ended(job))

    def change_nodes(self) -> None:
        """Add, drain, resume or lose a node."""
        others = [name for name in self.nodes if name != HERE]
        if not others or self.chance.random() < 0.4:
            self.joined += 1
            name, sizes = f"node {self.joined}", [self.chance.randint(1, 4) for _ in range(4)]
            init, run, evaluate, live = sizes
            self.nodes[name] = StageLimits(init=init, run=run, eval=evaluate, max_jobs_with_sandbox=live)
            self.apply(self.scheduler.join(name, self.nodes[name]))
            return
        name = self.chance.choice(others)
        if self.chance.random() < 0.5:
            del self.nodes[name]
            self.drained.discard(name)
            waited = self.scheduler.waiting_on(name)
            decisions = self.scheduler.lost(name)
            assert [d.job for d in decisions if isinstance(d, Close)] == waited
            self.apply(decisions)
        else:
            self.drained ^= {name}
            self.apply(self.scheduler.admit(name, jobs=name not in self.drained))

    def visit(self) -> None:
        """Add, prepare or remove an external episode."""
        guests = list(self.guests)
        if not guests or self.chance.random() < 0.3:
            self.invited += 1
            guest, here = f"guest {self.invited}", self.chance.random() < 0.3
            self.tied |= {guest} if here else set()
            self.apply(self.scheduler.reserve(guest, here=here))
            return
        guest = self.chance.choice(guests)
        if self.guests[guest] and self.chance.random() < 0.5:
            self.guests[guest] = False
            self.apply(self.scheduler.prepared(guest))
        else:
            self.leave(guest)

    def leave(self, guest: str) -> None:
        self.guests.pop(guest, None)
        self.apply(self.scheduler.release(guest))


limits = st.builds(
    StageLimits,
    init=st.integers(1, 4),
    run=st.integers(1, 4),
    eval=st.integers(1, 4),
    max_jobs_with_sandbox=st.integers(1, 12),
    attempts=st.integers(1, 3),
)


@given(limits, st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 2**32))
def test_no_job_is_lost_and_no_limit_exceeded_whatever_happens(
    limits: StageLimits, groups: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    world = World(limits, chance)
    jobs = [(f"{g}/{i}", str(g)) for g, size in enumerate(groups) for i in range(size)]
    for g, size in enumerate(groups):
        world.submit(str(g), size, branches=chance.random() < 0.5)
        if world.running and chance.random() < 0.5:
            world.step()
        if chance.random() < 0.05:
            world.apply(world.scheduler.cancel(chance.choice(jobs)[0]))
    while len(world.scheduler):
        if not world.running and not world.closing:
            assert world.scheduler.paused or world.guests, "nothing happens although nothing holds it back"
            world.apply(world.scheduler.resume())
            for guest in list(world.guests):
                world.leave(guest)
        world.step()
    for number in range(world.invited):
        world.leave(f"guest {number + 1}")
    assert set(world.finished) == {job for job, _ in jobs}, "a job without an end"
    assert len(world.scheduler) == 0
    assert world.scheduler.jobs_with_sandbox == 0
    for job, state in world.finished.items():
        if state is JobState.DONE:
            last = max(attempt for attempt, _ in world.stages[job])
            done = [stage for attempt, stage in world.stages[job] if attempt == last]
            assert list(dict.fromkeys(done)) == [Stage.INIT, Stage.RUN, Stage.EVAL]
            assert done.count(Stage.RUN) == 1 or (job.endswith("/0") and done.count(Stage.RUN) == 2)
        assert all(attempt <= limits.attempts for attempt, _ in world.stages[job])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10), st.integers(1, 20))
def test_no_group_waits_for_more_than_one_turn_of_each_other(sizes: list[int], turn: int) -> None:
    queue = FairQueue(turn)
    for group, size in enumerate(sizes):
        for i in range(size):
            queue.push(f"{group}/{i}", str(group))
    order = [queue.pop() for _ in range(sum(sizes))]
    assert sorted(order) == sorted(f"{g}/{i}" for g, size in enumerate(sizes) for i in range(size))
    for group in range(len(sizes)):
        assert order.index(f"{group}/0") <= group * turn
        mine = [job for job in order if job.startswith(f"{group}/")]
        assert mine == [f"{group}/{i}" for i in range(sizes[group])]
