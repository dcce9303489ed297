"""Batches of a killed service: the next service makes the same decisions and continues."""

import asyncio
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.batches import BatchRequest, BatchState, BatchTask, BatchTasks
from prorl_envs.rollout.api.types import AgentLimits, JobState
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.episode.environments import Defaults
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.store.base import StoredBatch
from prorl_envs.rollout.store.sqlite import SqliteStore
from tests.rollout.batches.batch_bench import PacedModel, batch, rows
from tests.rollout.killed import free_port, sandboxes_gone, service
from tests.rollout.test_end_to_end import BOOK, TASK
from tests.support.audit import AuditCounts
from tests.support.leaks import OpenResources
from tests.support.timed_server import TimedServer
from tests.support.toy import ToyWorld, empty_node

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

FIRST = batch(
    "a",
    groups=3,
    samples=3,
    min_rewards=2,
    in_flight=4,
    tasks=9,
    on_complete="carry",
    weight_version=1,
    stream_open=True,
)
SECOND = batch(
    "b", groups=2, samples=3, carry_from="a", tasks=9, weight_version=2, max_staleness=1, in_flight=2
)


def rewards(group: str, sample: int) -> float:
    """Make every third group informative, regardless of the order of its samples."""
    return sample * 0.5 if int(group.rpartition("/")[2]) % 3 == 1 else 1.0


class Photographed(SqliteStore):
    """Store that is copied after each transaction: the content of the disk if the service is killed there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.pictures: list[Path] = []

    def _commit(self) -> None:
        """Write one item per transaction, because the usual number of items per transaction depends on the
        machine."""
        first, *others = self._waiting
        self._waiting = [first]
        super()._commit()
        self._waiting += others

    def _transaction(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        done = super()._transaction(works)
        self.pictures.append(self.path.with_name(f"picture{len(self.pictures)}.db"))
        self._photograph(self.pictures[-1])
        return done

    def _photograph(self, picture: Path) -> None:
        with closing(sqlite3.connect(self.path)) as mine, closing(sqlite3.connect(picture)) as other:
            mine.backup(other)


async def started(store: SqliteStore, model: PacedModel) -> RolloutService:
    service = RolloutService(
        empty_node(), {"toy": ToyWorld().family()}, model.renderer, model, ServiceSettings(), store
    )
    await service.start()
    return service


async def train(service: RolloutService, model: PacedModel) -> None:
    """Run two steps of a trainer, which does not notice the restarts."""
    batches = service.batches
    await batches.submit(FIRST)
    await batches.extend("a", BatchTasks(first=9, tasks=rows(3, first=9), stream_open=False))
    assert (await batches.view("a", wait_s=60)).state is BatchState.COMPLETE
    await batches.submit(SECOND)
    model.release_all()
    assert (await batches.view("b", wait_s=60)).state is BatchState.COMPLETE


def selected(service: RolloutService, name: str) -> list[tuple[str, tuple[str, ...], tuple[float, ...]]]:
    known = {view.id for view in service.batches.views()}
    found = service.batches.selected(name).groups if name in known else []
    return [(group.group_id, tuple(group.job_ids), tuple(group.rewards)) for group in found]


@pytest.mark.thorough
async def test_after_a_kill_at_any_write_decisions_are_the_same_and_work_continues(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    model = PacedModel(renderer, rewards)
    model.hold("a/5", "a/10")
    store = Photographed(tmp_path / "store.db")
    service = await started(store, model)
    await train(service, model)
    final = {name: selected(service, name) for name in ("a", "b")}
    await service.stop()
    await store.aclose()
    assert len(final["a"]) == 3
    assert len(final["b"]) == 2
    assert {group.rpartition("/")[0] for group, *_ in final["b"]} <= {"a", "b"}
    assert len(store.pictures) > 20
    for picture in store.pictures:
        await _goes_on(picture, PacedModel(renderer, rewards), final)


async def _goes_on(picture: Path, model: PacedModel, final: dict[str, list[Any]]) -> None:
    store = SqliteStore(picture)
    service = await started(store, model)
    before = {name: selected(service, name) for name in final}
    for name, groups in before.items():
        assert groups == final[name][: len(groups)], "what was decided stays"
    await train(service, model)
    after = {name: selected(service, name) for name in final}
    for name, groups in before.items():
        assert after[name][: len(groups)] == groups
        assert len(after[name]) == len(final[name])
    both = [group for name in final for group, *_ in after[name]]
    assert len(both) == len(set(both)), "a group counted twice"
    while service.status().unfinished:  # noqa: ASYNC110 - the service has no event for it
        await asyncio.sleep(0)
    results = await store.results(0, 1000)
    jobs = [result.job_id for result in results]
    assert len(jobs) == len(set(jobs)), "a result given twice"
    assert max(result.attempts for result in results) <= 2
    await service.stop()  # a group that was being started is stored completely
    kept = {group.request.id for _, groups in await store.batches() for group in groups}
    for name in final:
        view = await service.batches.view(name)
        own = [f"{name}/{index}" for index in range(view.tasks)]
        assert [group for group in own if group in kept] == own[: view.started], "in order, each once"
    await store.aclose()


async def test_a_cancelled_batch_stays_cancelled(make_bench: Any, renderer: TemplateRenderer) -> None:
    """This holds also if the service was killed before it recorded the cancellation of the batch's jobs."""
    model = PacedModel(renderer)
    model.hold("a/1")
    bench = await make_bench(model=model)
    await bench.service.batches.submit(batch(groups=2, max_speculative_groups=0, tasks=5))
    await bench.finished(2)
    at = await bench.service.store.cancel_batch("a")  # and nothing more: the state if it is killed here
    again = await make_bench(model=PacedModel(renderer), kept_in=bench.service.store)
    view = await again.service.batches.view("a")
    assert (view.state, view.informative, view.started) == (BatchState.CANCELLED, 1, 2)
    ends = [result.state for result in await again.finished(4)]
    assert (at, ends) == (2, [JobState.DONE] * 2 + [JobState.CANCELLED] * 2)
    await again.gone()


async def test_stale_groups_are_cancelled_after_a_restart(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    """The service was killed after it stored the next batch, but before it recorded the cancellations."""
    model = PacedModel(renderer)
    model.hold("a/0")
    bench = await make_bench(model=model)
    await bench.service.batches.submit(batch(in_flight=2, on_complete="carry", weight_version=1))
    assert (await bench.service.batches.view("a", wait_s=60)).carriable == 1
    following = batch("b", tasks=0, carry_from="a", weight_version=3, max_staleness=1)
    await bench.service.store.open_batch(StoredBatch(following, "a", dropped=1))
    again = await make_bench(model=PacedModel(renderer), kept_in=bench.service.store)
    ends = {result.job_id: result.state for result in await again.finished(4)}
    assert [ends["a/0/0"], ends["a/0/1"]] == [JobState.CANCELLED] * 2
    view = await again.service.batches.view("b")
    assert (view.state, view.dropped) == (BatchState.EXHAUSTED, 1)


async def test_priorities_survive_a_restart(make_bench: Any, renderer: TemplateRenderer) -> None:
    model = PacedModel(renderer)
    model.hold(*(f"{name}/{index}" for name in ("low", "high") for index in range(3)))
    bench = await make_bench(model=model)
    await bench.service.batches.submit(batch("low", groups=3, tasks=3))
    await bench.service.batches.submit(batch("high", groups=3, tasks=3, priority=1))
    await bench.world.until(lambda: bench.world.open == 12)
    one = dict.fromkeys(("init", "run", "eval", "max_jobs_with_sandbox"), 1)
    again = await make_bench(model=PacedModel(renderer), kept_in=bench.service.store, **one)
    order = [result.batch_id for result in await again.finished(12)]
    assert order == ["low"] + ["high"] * 6 + ["low"] * 5, "the first begins before the others are there"


async def test_a_batch_whose_environment_is_gone_fails_and_blocks_nothing(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    model = PacedModel(renderer)
    model.hold("a/0")
    bench = await make_bench(model=model)
    await bench.service.batches.submit(batch(in_flight=1))
    await bench.world.until(lambda: bench.world.open == 2)
    other = RolloutService(empty_node(), {}, renderer, model, store=bench.service.store)
    await other.start()
    view = await other.batches.view("a", wait_s=60)
    assert (view.state, view.started) == (BatchState.CANCELLED, 1)
    await other.stop(drain_s=60)
    ends = [(end.state, end.batch_id) for end in await bench.service.store.results(0, 9)]
    assert ends == [(JobState.FAILED, "a")] * 2


async def test_settings_inherited_from_the_environment_stay_inherited_over_a_restart(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    model = PacedModel(renderer)
    model.hold("a/0")
    own = {"toy": Defaults.of("toy", {"max_turns": 3}, {"temperature": 0.5})}
    family = {"toy": ToyWorld().family()}
    with_own_limits = BatchTask(task=rows(1)[0].task, limits=AgentLimits(max_turns=5))
    asked = batch(groups=3, tasks=[*rows(2), with_own_limits], in_flight=1, sampling={"top_p": 0.5})
    for last in (False, True):
        store = SqliteStore(tmp_path / "store.db")
        service = RolloutService(empty_node(), family, renderer, model, None, store, defaults=own)
        await service.start()
        await service.batches.submit(asked)
        if last:
            model.release_all()
            assert (await service.batches.view("a", wait_s=60)).state is BatchState.COMPLETE
            requests = [(await store.group(f"a/{index}")).request for index in range(3)]
        await service.stop()
        await store.aclose()
    assert [request.limits.max_turns for request in requests] == [3, 3, 5]
    sampling = {(request.sampling.temperature, request.sampling.top_p) for request in requests}
    assert sampling == {(0.5, 0.5)}


WANTED, KILLS = 3, 3


@pytest.mark.thorough
async def test_a_repeatedly_killed_service_completes_the_requested_batch(
    renderer: TemplateRenderer, run_dir: Path, tmp_path: Path
) -> None:
    """With real sandboxes, a real process and a real SIGKILL."""
    chance, port = random.Random(5), free_port()
    request = BatchRequest(
        id="step1",
        groups=WANTED,
        samples=3,
        min_rewards=2,
        in_flight=4,
        environment="bash",
        limits=AgentLimits(max_turns=8),
        tasks=[BatchTask(task=TASK) for _ in range(200)],
    )
    async with (
        TimedServer(BOOK, mix="solve=1,wrong=2", renderer=renderer) as model,
        RolloutClient(f"http://127.0.0.1:{port}", attempts=2000, max_pause_s=0.2) as client,
    ):
        before = OpenResources.now(run_dir).processes.keys()
        training = asyncio.create_task(step(client, request))
        for _ in range(KILLS):
            target = model.counts.requests + chance.randrange(5, 20)
            with service(model.url, port, tmp_path) as process:
                await model.until(partial(_asked, target))
                process.kill()
            await sandboxes_gone(run_dir, before)
        with service(model.url, port, tmp_path) as process:
            read = await training
            groups = (await client.batch_groups("step1")).groups
            view = await client.batch("step1")
            process.terminate()
        assert process.returncode == 0
    assert (view.state, view.informative) == (BatchState.COMPLETE, WANTED)
    assert read == [job for group in groups for job in group.job_ids]
    assert len(read) == len(set(read)) == 2 * WANTED
    assert all(sorted(group.rewards) == [0.0, 1.0] for group in groups)
    assert view.started == view.informative + view.uninformative + view.failed + view.cancelled


async def step(client: RolloutClient, request: BatchRequest) -> list[str]:
    """Return the batch that a trainer reads, with a client that does not notice the kills."""
    await client.submit_batch(request)
    return [result.job_id async for result in client.batch_results(request.id)]


def _asked(target: int, counts: AuditCounts) -> bool:
    return counts.requests >= target
