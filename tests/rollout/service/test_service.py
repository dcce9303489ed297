"""The service with real asyncio and toy environments: failures, cancellation, deadlines, stopping."""

import asyncio
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.audit.audit import TaskAudit
from prorl_envs.env.audit.record import AuditRecord
from prorl_envs.errors import FailureKind, InputError, ModelError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import Conflict, NotFound, QueueFull, Unavailable
from prorl_envs.rollout.api.types import JobState, Stage, StopReason
from tests.support.clock import FakeClock
from tests.support.toy import ToyModel, ToyWorld

pytestmark = pytest.mark.anyio


async def test_a_job_yields_its_result(bench: Any) -> None:
    result = await bench.result(bench.group(reward=0.5, metadata={"step": 3}))
    assert result.state is JobState.DONE
    assert (result.reward, result.mask_sample, result.failure) == (0.5, False, None)
    assert result.stop_reason is StopReason.FINISHED
    assert result.evidence == {"task": "g"}
    assert result.metadata == {"step": 3}
    assert result.trajectory.drift == 0
    assert sum(result.trajectory.loss_mask) > 0
    assert [tool["function"]["name"] for tool in result.tools] == ["say", "finish"]
    await bench.idle()


async def test_the_group_has_statistics_when_complete(bench: Any) -> None:
    bench.world.gates["eval"] = asyncio.Event()
    await bench.submit(bench.group(samples=3))
    await bench.world.until(lambda: bench.world.inside["eval"] == 3)
    view = await bench.service.groups.group("g")
    assert not view.complete
    assert view.statistics is None
    assert {job.state for job in view.jobs} == {JobState.EVAL}
    bench.world.gates["eval"].set()
    await bench.finished(3)
    statistics = (await bench.service.groups.group("g")).statistics
    assert statistics.rewards == [1.0, 1.0, 1.0]
    assert (statistics.mean, statistics.std, statistics.informative) == (1.0, 0.0, False)


@pytest.mark.parametrize(
    ("step", "fault", "kind", "stage"),
    [
        ("init", "environment", FailureKind.ENVIRONMENT, Stage.INIT),
        ("init", "sandbox", FailureKind.SANDBOX, Stage.INIT),
        ("init", "crash", FailureKind.INTERNAL, Stage.INIT),
        ("eval", "grader", FailureKind.GRADER, Stage.EVAL),
        ("eval", "crash", FailureKind.INTERNAL, Stage.EVAL),
        ("eval", "nan", FailureKind.GRADER, Stage.EVAL),
        ("eval", "not_json", FailureKind.GRADER, Stage.EVAL),
        ("call", "tool", FailureKind.TOOL, Stage.RUN),
        ("call", "crash", FailureKind.INTERNAL, Stage.RUN),
    ],
)
async def test_a_failure_is_typed_has_no_reward_and_does_not_affect_other_jobs(
    bench: Any, step: str, fault: str, kind: FailureKind, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.submit(bench.group("bad", faults={step: fault}), bench.group("good", samples=4))
    by_group = {result.job_id: result for result in await bench.finished(5)}
    bad = by_group.pop("bad/0")
    assert (bad.state, bad.reward, bad.mask_sample) == (JobState.FAILED, None, True)
    assert (bad.failure.kind, bad.failure.stage) == (kind, stage)
    assert all(result.reward == 1.0 for result in by_group.values())
    await bench.idle()
    assert bench.service.status().failures == {kind.value: 1}
    loud = [record for record in caplog.records if record.levelno >= logging.ERROR and record.exc_info]
    assert bool(loud) == (kind is FailureKind.INTERNAL), "a bug, and only a bug, is loud"
    statistics = (await bench.service.groups.group("bad")).statistics
    assert (statistics.rewards, statistics.mean) == ([None], None)
    assert statistics.failures == {kind.value: 1}


async def test_infrastructure_failures_are_retried_in_a_new_environment(bench: Any) -> None:
    result = await bench.result(bench.group(faults={"call": "once_sandbox"}))
    assert (result.reward, result.attempts) == (1.0, 2)
    steps = [step for _, step in bench.world.log]
    first = ["init", "call", "close", "init", "call", "eval"]
    assert steps[:6] == first, "the old environment is closed before the new one starts"
    assert bench.service.status().retries == 1


async def test_retries_are_bounded(make_bench: Any) -> None:
    bench = await make_bench(attempts=3)
    result = await bench.result(bench.group(faults={"init": "sandbox"}))
    assert (result.state, result.attempts) == (JobState.FAILED, 3)
    assert result.failure.retryable


async def test_a_model_failure_has_no_reward(make_bench: Any, renderer: TemplateRenderer) -> None:
    model = ToyModel(renderer, lambda *_: ModelError("no server"))
    bench = await make_bench(model=model)
    result = await bench.result(bench.group())
    assert (result.failure.kind, result.reward) == (FailureKind.MODEL, None)
    assert list(model.prompts) == ["g/0"], "another attempt is the same session"


async def test_seeds_differ_within_a_group(make_bench: Any, renderer: TemplateRenderer) -> None:
    model = ToyModel(renderer, lambda *_: "done")
    bench = await make_bench(model=model)
    await bench.submit(bench.group(samples=3, sampling={"seed": 10}))
    await bench.finished(3)
    assert {job: [s.seed for s in asked] for job, asked in model.samplings.items()} == {
        "g/0": [10],
        "g/1": [11],
        "g/2": [12],
    }


@pytest.mark.parametrize(("step", "stage"), [("init", Stage.INIT), ("eval", Stage.EVAL)])
async def test_a_hanging_stage_is_stopped_at_its_deadline(make_bench: Any, step: str, stage: Stage) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, init=1, eval=1)
    limits = {"init_s": 100, "eval_s": 100}
    await bench.submit(bench.group(faults={step: "hang"}, limits=limits), bench.group("next"))
    await bench.world.until(lambda: bench.world.inside[step] == 1)
    clock.advance(99)
    await asyncio.sleep(0)
    assert bench.world.inside[step] == 1
    clock.advance(1)
    results = {result.group_id: result for result in await bench.finished(2)}
    failure = results["g"].failure
    assert (failure.kind, failure.stage, failure.retryable) == (FailureKind.TIMEOUT, stage, False)
    assert results["next"].reward == 1.0


async def test_waiting_does_not_count_against_a_deadline(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, init=1)
    bench.world.gates["init"] = asyncio.Event()
    await bench.submit(bench.group("a", limits={"init_s": 1000}), bench.group("b", limits={"init_s": 5}))
    await bench.world.until(lambda: bench.world.inside["init"] == 1)
    clock.advance(500)
    bench.world.gates["init"].set()
    results = await bench.finished(2)
    assert [result.state for result in results] == [JobState.DONE, JobState.DONE]
    assert results[1].timings.queued_s == 500
    assert results[0].timings.init_s == 500


async def test_a_hanging_tool_is_a_timeout_and_a_slow_one_is_graded(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, grace_s=10)
    await bench.submit(bench.group("stuck", faults={"call": "hang"}, limits={"run_s": 100}))
    await bench.world.until(lambda: bench.world.inside["call"] == 1)
    clock.advance(100)
    await asyncio.sleep(0)
    assert bench.world.inside["call"] == 1, "the tool has its grace to end in order"
    clock.advance(10)
    [result] = await bench.finished(1)
    assert (result.failure.kind, result.failure.stage) == (FailureKind.TIMEOUT, Stage.RUN)
    assert len(result.trajectory.turns) == 1, "what was sampled is kept"


async def test_a_close_that_hangs_or_fails_blocks_no_other_job(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock, close_s=10)
    await bench.submit(bench.group("stuck", faults={"close": "hang"}))
    await bench.submit(bench.group("broken", faults={"close": "sandbox"}))
    results = await bench.finished(2)
    assert {result.reward for result in results} == {1.0}, "the result does not wait for the close"
    await bench.world.until(lambda: bench.world.inside["close"] == 1)
    clock.advance(10)
    await bench.gone()
    assert bench.service.status().close_failures == 2


@pytest.mark.parametrize("step", ["init", "call", "eval"])
async def test_cancelling_is_acknowledged_at_once_and_closes_the_sandbox(bench: Any, step: str) -> None:
    bench.world.gates[step] = asyncio.Event()
    bench.world.gates["close"] = asyncio.Event()
    await bench.submit(bench.group())
    await bench.world.until(lambda: bench.world.inside[step] == 1)
    view = await bench.service.groups.cancel_job("g/0")
    assert (view.state, view.failure) == (JobState.CANCELLED, FailureKind.CANCELLED)
    [result] = await bench.finished(1)
    assert (result.state, result.reward, result.mask_sample) == (JobState.CANCELLED, None, True)
    assert bench.world.open == 1
    bench.world.gates["close"].set()
    await bench.idle()
    assert (await bench.service.groups.cancel_job("g/0")).state is JobState.CANCELLED


async def test_cancelling_a_group_keeps_finished_results(make_bench: Any) -> None:
    bench = await make_bench(init=1, run=1, eval=1)
    await bench.submit(bench.group(samples=1))
    await bench.finished(1)
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group("h", samples=6))
    await bench.world.until(lambda: bench.world.inside["call"] == 1)
    view = await bench.service.groups.cancel("h")
    assert view.complete
    assert (view.jobs[0].attempts, view.jobs[-1].attempts) == (1, 0), "the last one was never started"
    assert {job.state for job in view.jobs} == {JobState.CANCELLED}
    assert (await bench.service.groups.cancel("g")).jobs[0].state is JobState.DONE
    await bench.idle()


@pytest.mark.parametrize("seed", range(8))
async def test_cancelling_at_random_moments_leaks_nothing(make_bench: Any, seed: int) -> None:
    bench = await make_bench(init=3, run=4, eval=2, max_jobs_with_sandbox=7)
    chance = random.Random(seed)
    faults: list[dict[str, str]] = [
        {},
        {},
        {"init": "hang"},
        {"call": "hang"},
        {"eval": "hang"},
        {"init": "once_sandbox"},
        {"call": "crash"},
        {"eval": "grader"},
    ]
    groups = [bench.group(f"g{i}", samples=3, faults=chance.choice(faults)) for i in range(30)]
    jobs = [f"{group.id}/{i}" for group in groups for i in range(3)]
    await bench.submit(*groups)
    for job in chance.sample(jobs, len(jobs)):
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        await bench.service.groups.cancel_job(job)
    results = await bench.finished(len(jobs))
    assert sorted(result.job_id for result in results) == sorted(jobs), "one result for every job"
    await bench.idle()
    await bench.gone()
    status = bench.service.status()
    assert (status.jobs_with_sandbox, status.close_failures) == (0, 0)
    assert {pool.active + pool.waiting for pool in status.pools.values()} == {0}
    for stage, most in (("init", 3), ("call", 4), ("eval", 2)):
        assert bench.world.most[stage] <= most


async def test_the_stages_overlap(make_bench: Any) -> None:
    bench = await make_bench(init=1, run=1, eval=1, max_jobs_with_sandbox=10)
    for step in ("init", "call", "eval"):
        bench.world.gates[step] = asyncio.Event()
    await bench.submit(bench.group(samples=4))
    for step in ("init", "call"):
        await bench.world.until(lambda step=step: bench.world.inside[step] == 1)
        bench.world.gates.pop(step).set()
    await bench.world.until(lambda: bench.world.inside["eval"] == 1)
    bench.world.gates["call"] = asyncio.Event()
    bench.world.gates["init"] = asyncio.Event()
    await bench.submit(bench.group("late", samples=3))
    await bench.world.until(lambda: bench.world.inside["init"] == 1)
    assert bench.world.inside["eval"] == 1
    for gate in bench.world.gates.values():
        gate.set()
    await bench.finished(7)


async def test_a_slow_run_bounds_the_sandboxes_in_front_of_it(make_bench: Any) -> None:
    bench = await make_bench(init=2, run=1, eval=1, max_jobs_with_sandbox=4)
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group(samples=20))
    await bench.world.until(lambda: bench.world.log.count(("g", "init")) == 4)
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.world.open == 4
    assert bench.service.status().pools["run"].waiting == 3
    bench.world.gates["call"].set()
    await bench.finished(20)


async def test_submission_is_idempotent_and_other_content_a_conflict(bench: Any) -> None:
    await bench.submit(bench.group(samples=2))
    await bench.submit(bench.group(samples=2), bench.group("other"))
    await bench.finished(3)
    with pytest.raises(Conflict):
        await bench.submit(bench.group(samples=3))
    await bench.submit(bench.group(samples=2))
    assert Counter(task for task, step in bench.world.log if step == "init") == {"g": 2, "other": 1}


async def test_invalid_requests_are_refused_before_any_is_accepted(bench: Any) -> None:
    good = bench.group()
    unknown = good.model_copy(update={"id": "u", "environment": "nowhere"})
    wrong = good.model_copy(update={"id": "w", "task": {"id": "x", "instruction": "y", "what": 1}})
    for bad in (unknown, wrong):
        with pytest.raises(InputError):
            await bench.submit(good, bad)
    with pytest.raises(NotFound):
        await bench.service.groups.group("g")
    for unknown_job in ("g/0", "g", "nope/1", ""):
        with pytest.raises(NotFound):
            await bench.service.groups.job(unknown_job)


async def test_tasks_that_did_not_pass_the_audit_are_refused(make_bench: Any, tmp_path: Path) -> None:
    family, record = ToyWorld().family(), AuditRecord(tmp_path / "audit.jsonl", is_new=True)
    record.add(family, family.load({"id": "g", "instruction": "x"}), TaskAudit(task_id="g"))
    bench = await make_bench(require_audit=tmp_path / "audit.jsonl")
    with pytest.raises(InputError, match=r"g: audit\.jsonl has no audit of this task as it is now"):
        await bench.submit(bench.group(reward=0.5))
    audited = bench.group()
    task = {"id": "g", "instruction": "x"}
    result = await bench.result(audited.model_copy(update={"task": task}))
    assert result.reward == 1.0


async def test_a_full_queue_refuses_jobs_and_accepts_them_again_later(make_bench: Any) -> None:
    bench = await make_bench(queue=3)
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group(samples=2))
    with pytest.raises(QueueFull, match="room for 1 of 2"):
        await bench.submit(bench.group("h", samples=2))
    await bench.submit(bench.group(samples=2), bench.group("i"))
    bench.world.gates["call"].set()
    await bench.finished(3)
    await bench.gone()
    await bench.submit(bench.group("h", samples=2))
    await bench.finished(5)


async def test_waiting_for_results_returns_with_the_first_or_at_the_time_limit(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock)
    waiting = asyncio.create_task(bench.service.feed.page(0, limit=10, wait_s=5))
    await clock.wait_for_sleepers()
    clock.advance(5)
    assert (await waiting).results == []
    waiting = asyncio.create_task(bench.service.feed.page(0, limit=10, wait_s=5))
    await bench.submit(bench.group())
    page = await waiting
    assert [result.job_id for result in page.results] == ["g/0"]
    assert page.next == page.results[0].cursor


async def test_a_graceful_stop_lets_accepted_jobs_finish(bench: Any) -> None:
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group(samples=3))
    stopping = asyncio.create_task(bench.service.stop(drain_s=60))
    await bench.world.until(lambda: bench.world.inside["call"] == 3)
    with pytest.raises(Unavailable):
        await bench.submit(bench.group("late"))
    bench.world.gates["call"].set()
    await stopping
    assert [result.reward for result in await bench.finished(3)] == [1.0, 1.0, 1.0]
    assert bench.world.open == 0


@pytest.mark.parametrize("interrupted", [False, True])
async def test_an_immediate_stop_cancels_and_closes(make_bench: Any, interrupted: bool) -> None:
    bench = await make_bench(run=2, max_jobs_with_sandbox=4)
    bench.world.gates["call"] = asyncio.Event()
    await bench.submit(bench.group(samples=9))
    await bench.world.until(lambda: bench.world.inside["call"] == 2)
    stopping = asyncio.create_task(bench.service.stop(drain_s=600 if interrupted else 0))
    if interrupted:
        await asyncio.sleep(0)
        stopping.cancel()
    await asyncio.wait([stopping])
    assert bench.world.open == 0
    states = Counter(result.state for result in await bench.finished(9))
    assert states == {JobState.CANCELLED: 9}
    assert (await bench.service.feed.page(bench.results[-1].cursor, limit=1, wait_s=600)).results == []
