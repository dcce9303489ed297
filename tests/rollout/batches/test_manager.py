"""Batches in a running service: replacement, early end, carry-over, shares, bounds, cancellation."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from prorl_envs.config import RetentionSettings
from prorl_envs.errors import FailureKind, InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.batches import BatchState, BatchTasks, BatchView
from prorl_envs.rollout.api.errors import Conflict, NotFound, QueueFull, Unavailable
from prorl_envs.rollout.api.types import JobState
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.sqlite import MemoryStore
from tests.rollout.batches.batch_bench import PacedModel, batch, rows
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

WAIT_S = 60.0  # on a clock that stands still


@pytest.fixture
async def make(make_bench: Callable[..., Any], renderer: TemplateRenderer) -> Callable[..., Any]:
    """Make a service and its model."""

    async def make(
        rewards: Callable[[str, int], float] | None = None, **settings: Any
    ) -> tuple[Any, PacedModel]:
        model = PacedModel(renderer, rewards) if rewards else PacedModel(renderer)
        return await make_bench(model=model, clock=FakeClock(), **settings), model

    return make


async def over(bench: Any, name: str = "a") -> BatchView:
    view: BatchView = await bench.service.batches.view(name, wait_s=WAIT_S)
    assert view.state.over
    return view


def groups(bench: Any, name: str = "a") -> list[str]:
    return [group.group_id for group in bench.service.batches.selected(name).groups]


async def test_replenishment_groups_without_spread_are_replaced_from_the_stream(make: Any) -> None:
    bench, _ = await make(lambda group, sample: float(sample) if group in ("a/2", "a/4") else 1.0)
    await bench.service.batches.submit(batch(groups=2, in_flight=2, max_speculative_groups=0, tasks=9))
    view = await over(bench)
    assert view.state is BatchState.COMPLETE
    assert (view.informative, view.uninformative, view.failed) == (2, 3, 0)
    assert (view.started, view.tasks, view.reasons) == (5, 9, {"equal_rewards": 3})
    assert groups(bench) == ["a/2", "a/4"]
    assert {task for task, _ in bench.world.log} == {"t0", "t1", "t2", "t3", "t4"}
    selected = bench.service.batches.selected("a").groups[0]
    assert (selected.mean, selected.std, selected.rewards) == (0.5, 0.5, [0.0, 1.0])
    assert (selected.task_index, selected.started_by_batch) == (2, "a")
    await bench.idle()


async def test_early_termination_unneeded_groups_are_cancelled(make: Any) -> None:
    bench, model = await make()
    model.hold("a/0", "a/1")
    await bench.service.batches.submit(batch(groups=1, in_flight=3, tasks=9))
    view = await over(bench)
    assert (view.state, view.informative, view.cancelled, view.started) == (BatchState.COMPLETE, 1, 2, 3)
    assert groups(bench) == ["a/2"]
    results = await bench.finished(6)
    ends = Counter((result.group_id, result.state) for result in results)
    done, cancelled = JobState.DONE, JobState.CANCELLED
    assert ends == {("a/2", done): 2, ("a/0", cancelled): 2, ("a/1", cancelled): 2}
    assert {result.batch_id for result in results} == {"a"}
    await bench.idle()
    await bench.gone()


async def test_early_termination_two_rewards_of_four_are_enough(make: Any) -> None:
    bench, model = await make()
    model.hold("a/0/1", "a/0/3")
    await bench.service.batches.submit(batch(samples=4, min_rewards=2, filter=None, tasks=1))
    view = await over(bench)
    assert (view.state, view.cancelled) == (BatchState.COMPLETE, 0)
    [selected] = bench.service.batches.selected("a").groups
    assert selected.job_ids == ["a/0/0", "a/0/2"]
    states = {result.job_id: result.state for result in await bench.finished(4)}
    assert [states[f"a/0/{sample}"] for sample in (1, 3)] == [JobState.CANCELLED] * 2
    page = await bench.service.batches.results("a", 0, limit=10)
    assert [result.job_id for result in page.results] == selected.job_ids
    await bench.idle()


async def test_carry_over_leftover_groups_count_for_the_next_batch(make: Any) -> None:
    bench, model = await make()
    batches = bench.service.batches
    model.hold("a/0", "a/1")
    await batches.submit(batch("a", in_flight=3, tasks=3, on_complete="carry", weight_version=7))
    view = await over(bench, "a")
    assert (view.state, view.carriable, view.cancelled) == (BatchState.COMPLETE, 2, 0)
    following = batch("b", groups=2, tasks=0, carry_from="a", weight_version=8, max_staleness=1)
    view = await batches.submit(following)
    assert (view.carried_in, view.dropped, view.in_flight) == (2, 0, 2)
    assert (await batches.view("a")).carried_over == 2
    assert (await bench.service.groups.group("a/0")).batch_id == "b"
    model.release("a/0", "a/1")
    view = await over(bench, "b")
    assert (view.state, view.informative, view.started) == (BatchState.COMPLETE, 2, 0)
    selected = batches.selected("b").groups
    assert {group.group_id for group in selected} == {"a/0", "a/1"}
    assert {(group.started_by_batch, group.weight_version) for group in selected} == {("a", 7)}
    results = await bench.finished(6)
    assert {result.attempts for result in results} == {1}, "nothing was begun again"
    assert groups(bench, "a") == ["a/2"]


async def test_carry_over_stale_groups_are_cancelled(make: Any) -> None:
    bench, model = await make()
    batches = bench.service.batches
    model.hold("a/0", "b/0")
    await batches.submit(batch("a", in_flight=2, tasks=2, on_complete="carry", weight_version=7))
    await over(bench, "a")
    following = batch(
        "b", in_flight=3, carry_from="a", on_complete="carry", weight_version=8, max_staleness=1, tasks=2
    )
    await batches.submit(following)
    assert (await over(bench, "b")).carriable == 2
    view = await batches.submit(batch("c", tasks=0, carry_from="b", weight_version=9, max_staleness=1))
    assert (view.carried_in, view.dropped) == (1, 1)
    cancelled = [r.job_id for r in await bench.finished(6) if r.state is JobState.CANCELLED]
    assert sorted(cancelled) == ["a/0/0", "a/0/1"], "of version 7, and b/0 is of 8"
    view = await batches.view("b")
    assert (view.carried_over, view.carriable, view.cancelled) == (1, 0, 1)
    model.release("b/0")
    assert (await over(bench, "c")).state is BatchState.COMPLETE
    assert groups(bench, "c") == ["b/0"]


async def test_groups_without_rewards_fail_and_are_replaced(make: Any) -> None:
    bench, _ = await make()
    broken = rows(1, faults={"eval": "grader"})
    await bench.service.batches.submit(batch(tasks=[*broken, *rows(1, first=1)], max_speculative_groups=0))
    view = await over(bench)
    assert (view.state, view.failed, view.informative) == (BatchState.COMPLETE, 1, 1)
    assert (view.reasons, view.failures) == ({"too_few_rewards": 1}, {"grader": 2})


async def test_a_stream_that_is_too_short_is_exhausted(make: Any) -> None:
    bench, _ = await make(lambda *_: 0.25)
    await bench.service.batches.submit(batch(tasks=3, groups=2))
    view = await over(bench)
    assert (view.state, view.uninformative, view.started) == (BatchState.EXHAUSTED, 3, 3)
    assert groups(bench) == []


async def test_a_stream_can_be_extended_while_the_batch_runs(make: Any) -> None:
    bench, _ = await make(lambda group, sample: float(sample) if group == "a/2" else 0.0)
    batches = bench.service.batches
    await batches.submit(batch(tasks=1, stream_open=True))
    assert (await batches.view("a", wait_s=WAIT_S)).waiting_for_tasks
    for _ in range(2):  # as a caller does that did not receive the first answer
        view = await batches.extend("a", BatchTasks(first=1, tasks=rows(1, first=1)))
        assert view.tasks == 2
    with pytest.raises(Conflict, match="not the tasks from index 1"):
        await batches.extend("a", BatchTasks(first=1, tasks=rows(1, first=9)))
    with pytest.raises(Conflict, match="from index 3"):
        await batches.extend("a", BatchTasks(first=3, tasks=rows(1, first=3)))
    await batches.extend("a", BatchTasks(first=1, tasks=rows(2, first=1), stream_open=False))
    assert (await over(bench)).state is BatchState.COMPLETE
    with pytest.raises(Conflict, match="has ended"):
        await batches.extend("a", BatchTasks(first=3, tasks=rows(1, first=3)))


async def test_a_cancelled_batch_keeps_its_groups(make: Any) -> None:
    bench, model = await make()
    model.hold("a/1")
    await bench.service.batches.submit(batch(groups=2, tasks=9))
    await bench.world.until(lambda: bench.world.inside["call"] == 0 and groups(bench) == ["a/0"])
    view = await bench.service.batches.cancel("a")
    assert (view.state, view.informative) == (BatchState.CANCELLED, 1)
    assert view == await bench.service.batches.cancel("a")
    assert (await bench.service.groups.group("a/1")).complete, "its results are recorded when this answers"
    assert (await bench.service.batches.results("a", 0, limit=9)).next == 2
    await bench.gone()


async def test_leftover_groups_are_cancelled_with_their_batch(make: Any) -> None:
    bench, model = await make(lambda group, sample: float(sample) if group.startswith("a") else 1.0)
    batches = bench.service.batches
    model.hold("a/0")
    await batches.submit(batch("a", in_flight=2, on_complete="carry"))
    assert (await over(bench, "a")).carriable == 1
    view = await batches.cancel("a")
    assert (view.state, view.carriable, view.cancelled) == (BatchState.COMPLETE, 0, 1)
    assert (await bench.service.groups.group("a/0")).complete
    await batches.submit(batch("b"))
    assert await over(bench, "b") == await batches.cancel("b"), "what is exhausted stays so"


async def test_a_group_cancelled_by_the_caller_is_replaced(make: Any) -> None:
    bench, model = await make()
    model.hold("a/0")
    await bench.service.batches.submit(batch(tasks=2))
    await bench.world.until(lambda: bench.world.open == 2)
    await bench.service.groups.cancel("a/0")
    view = await over(bench)
    assert (view.state, view.failed, view.failures) == (BatchState.COMPLETE, 1, {"cancelled": 2})


async def test_submission_is_idempotent_and_typed(make: Any) -> None:
    bench, _ = await make(batch_groups=10, batch_tasks=5)
    batches, service = bench.service.batches, bench.service
    await asyncio.gather(*(batches.submit(batch()) for _ in range(3)))
    assert len(batches.views()) == 1
    with pytest.raises(Conflict, match="another request"):
        await batches.submit(batch(groups=2))
    for fields in ({"groups": 11}, {"in_flight": 11}, {"tasks": 6}):
        with pytest.raises(InputError, match="at most"):
            await batches.submit(batch("new", **fields))
    with pytest.raises(InputError, match=r"task 1: .*nowhere"):
        bad = rows(1)[0].model_copy(update={"environment": "nowhere"})
        await batches.submit(batch("new", tasks=[*rows(1), bad]))
    with pytest.raises(InputError, match="task 0: no environment"):
        await batches.submit(batch("new", environment=None))
    for name in ("none", "a"):
        with pytest.raises((NotFound, Conflict)):
            await batches.submit(batch("new", carry_from=name))
    with pytest.raises(NotFound):
        await batches.view("new")
    with pytest.raises(Conflict, match="batch's group"):
        await service.groups.submit([bench.group("a/17")])
    await service.groups.submit([bench.group("b/0")])
    with pytest.raises(Conflict, match="b/<index>"):
        await batches.submit(batch("b"))
    await service.groups.submit([bench.group("c/d/0")])
    await batches.submit(batch("c"))
    await over(bench, "c")


async def test_leftover_groups_are_carried_over_once(make: Any) -> None:
    bench, model = await make()
    batches = bench.service.batches
    model.hold("a/0")
    await batches.submit(batch("a", in_flight=2, on_complete="carry"))
    with pytest.raises(Conflict, match="running"):
        await batches.submit(batch("b", carry_from="a", in_flight=1))
    await over(bench, "a")
    await batches.submit(batch("b", carry_from="a", tasks=0))
    with pytest.raises(Conflict, match="another batch carried"):
        await batches.submit(batch("c", carry_from="a"))
    await batches.submit(batch("b", carry_from="a", tasks=0))
    model.release("a/0")
    await over(bench, "b")
    with pytest.raises(Conflict, match="leaves nothing"):
        await batches.submit(batch("c", carry_from="b"))


async def test_running_batches_are_bounded(make: Any) -> None:
    bench, model = await make(batches=1)
    model.hold("a/0")
    await bench.service.batches.submit(batch("a", in_flight=1))
    with pytest.raises(QueueFull):
        await bench.service.batches.submit(batch("b"))
    model.release("a/0")
    await over(bench, "a")
    await bench.service.batches.submit(batch("b"))
    await over(bench, "b")


async def test_a_batch_waits_for_room_in_the_queue(make: Any) -> None:
    bench, model = await make(queue=5)
    model.hold("other")
    await bench.submit(bench.group("other", samples=2))
    await bench.service.batches.submit(batch(groups=6, tasks=6))
    await bench.finished(2)
    assert bench.service.status().unfinished <= 5
    view = await over(bench)
    assert (view.state, view.informative) == (BatchState.COMPLETE, 6)
    model.release("other")
    await bench.gone()


async def test_finished_batches_are_forgotten_with_their_groups(make: Any) -> None:
    bench, _ = await make(retention=RetentionSettings(max_batches=2, max_results=3))
    for name in ("a", "b", "c", "d"):
        await bench.service.batches.submit(batch(name))
        await over(bench, name)
    await bench.gone()
    assert [view.id for view in bench.service.batches.views()] == ["b", "c", "d"]
    assert (await bench.service.batches.view("b")).informative == 1
    assert len(groups(bench, "b")) == 1
    with pytest.raises(NotFound, match="no longer kept"):
        await bench.service.batches.results("b", 0, limit=9)
    with pytest.raises(NotFound):
        await bench.service.groups.group("a/0")


async def test_finished_batches_with_unread_results_are_kept(make: Any) -> None:
    bench, _ = await make(retention=RetentionSettings(max_batches=1))
    batches = bench.service.batches
    for name in ("a", "b", "c"):
        await batches.submit(batch(name))
        await over(bench, name)
    await bench.gone()
    page = await batches.results("b", 0, limit=100)
    await batches.results("b", page.next, limit=100)
    await bench.service.store.put_value("flush", "")  # the acknowledgements before it are stored
    await batches.submit(batch("d"))
    assert [view.id for view in batches.views()] == ["a", "c", "d"]
    assert (await batches.results("a", 0, limit=100)).results


async def test_a_higher_priority_goes_first(make: Any) -> None:
    bench, model = await make(init=1, run=1, eval=1, max_jobs_with_sandbox=1)
    model.hold("low/0")
    await bench.service.batches.submit(batch("low", groups=3))
    await bench.world.until(lambda: bench.world.open == 1)
    await bench.service.batches.submit(batch("high", groups=3, priority=1, tasks=3))
    await bench.world.until(lambda: True)
    while bench.service.status().unfinished < 12:  # noqa: ASYNC110 - the service has no event for it
        await asyncio.sleep(0)
    model.release("low/0")
    await over(bench, "low")
    order = [result.group_id.partition("/")[0] for result in await bench.finished(12)]
    assert order == ["low"] + ["high"] * 6 + ["low"] * 5


async def test_tenants_share_by_weight_and_a_trainer_that_carries_stays_one(make: Any) -> None:
    bench, model = await make(init=1, run=1, eval=1, max_jobs_with_sandbox=1)
    batches = bench.service.batches
    model.hold("first/0")
    await batches.submit(batch("first", in_flight=2, on_complete="carry"))
    assert batches.share("first").lane == "first"
    await bench.world.until(lambda: bench.world.open == 1)
    model.release("first/0")
    await over(bench, "first")
    await batches.submit(batch("second", carry_from="first", weight=3.0))
    assert (batches.share("second").lane, batches.share("second").weight) == ("first", 3.0)
    await batches.submit(batch("third", tenant="first"))
    assert batches.share("third").lane == "first"
    await over(bench, "second")
    await over(bench, "third")


async def test_a_stopping_service_accepts_and_starts_nothing(make: Any) -> None:
    bench, model = await make()
    model.hold("a/0")
    await bench.service.batches.submit(batch(in_flight=1, tasks=5))
    waiting = asyncio.create_task(bench.service.batches.view("a", wait_s=WAIT_S))
    await bench.world.until(lambda: bench.world.open == 2)
    await bench.service.stop()
    assert (await waiting).state is BatchState.RUNNING
    assert {task for task, _ in bench.world.log} == {"t0"}
    with pytest.raises(Unavailable):
        await bench.service.batches.submit(batch("b"))


async def test_a_batch_survives_a_temporarily_unavailable_store(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    store, clock = Away(), FakeClock()
    bench = await make_bench(model=PacedModel(renderer), clock=clock, kept_in=store)
    await bench.service.batches.submit(batch())
    await clock.wait_for_sleepers(1)
    store.away = False
    clock.advance(60)
    assert (await over(bench)).state is BatchState.COMPLETE


class Away(MemoryStore):
    """Store that accepts no groups."""

    away = True

    async def submit(self, groups: Sequence[NewGroup]) -> list[bool]:
        if self.away:
            raise Unavailable("the disk is full")
        return await super().submit(groups)


async def test_a_bug_in_one_group_fails_only_that_group(make: Any) -> None:
    bench, _ = await make()
    broken = rows(1, faults={"init": "crash"})
    await bench.service.batches.submit(batch(tasks=[*broken, *rows(1, first=1)]))
    view = await over(bench)
    assert (view.failed, view.failures) == (1, {FailureKind.INTERNAL.value: 2})
    assert view.informative == 1
