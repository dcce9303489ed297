"""Promises of every store. To test a new store, add a line to `STORES`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.errors import FailureKind
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.errors import Conflict, CursorExpired, NotFound
from prorl_envs.rollout.api.types import (
    Failure,
    GroupRequest,
    JobState,
    Result,
    Selection,
    Stage,
    StopReason,
    Trajectory,
    job_id,
)
from prorl_envs.rollout.store.base import NewGroup, StoredBatch, StoredGroup, UnreadResults
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import MemoryStore, SqliteStore

STORES: dict[str, Callable[..., SqlStore]] = {
    "memory": lambda _, **bounds: MemoryStore(**bounds),
    "sqlite": lambda folder, **bounds: SqliteStore(folder / "store.db", **bounds),
    "sqlite, read back": lambda folder, **bounds: SqliteStore(folder / "store.db", **bounds),
    "sqlite, shared": lambda folder, **bounds: SqliteStore(folder / "store.db", **bounds),
}

pytestmark = pytest.mark.anyio


type MakeStore = Callable[..., SqlStore]


@pytest.fixture(params=STORES)
async def make_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeStore]:
    """Make a store with the given bounds."""
    made: list[SqlStore] = []
    if request.param == "sqlite, read back":
        monkeypatch.setattr("prorl_envs.rollout.store.base.RECENT_RESULTS", 0)
    if request.param == "sqlite, shared":
        monkeypatch.setattr("prorl_envs.rollout.store.sqlite._shared", lambda folder: True)

    def make(**bounds: Any) -> SqlStore:
        made.append(STORES[request.param](tmp_path, **bounds))
        return made[-1]

    yield make
    for store in made:
        await store.aclose()


@pytest.fixture
def store(make_store: MakeStore) -> SqlStore:
    return make_store()


def group(name: str = "g", samples: int = 2, **fields: object) -> NewGroup:
    request = GroupRequest.model_validate(
        {"id": name, "environment": "toy", "task": {"id": "t"}, "samples": samples, **fields}
    )
    return NewGroup(request, "t")


def result(group_id: str = "g", sample: int = 0, reward: float | None = 1.0, tokens: int = 0) -> Result:
    failure = Failure(kind=FailureKind.GRADER, stage=Stage.EVAL, message="no") if reward is None else None
    ids = list(range(tokens))
    return Result(
        job_id=job_id(group_id, sample),
        group_id=group_id,
        sample=sample,
        environment="toy",
        task_id="t",
        state=JobState.DONE if failure is None else JobState.FAILED,
        reward=reward,
        mask_sample=failure is not None,
        stop_reason=StopReason.FINISHED,
        failure=failure,
        trajectory=Trajectory(ids=ids, loss_mask=ids, logprobs=[0.0] * tokens, turns=[]) if tokens else None,
    )


def attempts_of(stored: StoredGroup) -> tuple[int, ...]:
    return tuple(job.attempts for job in stored.jobs)


async def read(store: SqlStore, new: Result) -> int:
    """Store a result, and mark it as read with the next write. Return its cursor."""
    cursor = (await store.record(new)).cursor
    store.acknowledge([cursor])
    return cursor


async def test_submission_is_idempotent(store: SqlStore) -> None:
    assert await store.submit([group("a"), group("b")]) == [True, True]
    assert await store.submit([group("b"), group("c"), group("c")]) == [False, True, False]


async def test_an_id_with_other_content_is_a_conflict_and_nothing_is_stored(store: SqlStore) -> None:
    await store.submit([group("a")])
    with pytest.raises(Conflict, match="'a'"):
        await store.submit([group("new"), group("a", samples=3)])
    with pytest.raises(NotFound):
        await store.group("new")
    with pytest.raises(Conflict):
        await store.submit([group("twice"), group("twice", metadata={"other": 1})])


async def test_results_are_returned_in_the_order_they_were_recorded(store: SqlStore) -> None:
    await store.submit([group("g", samples=5)])
    cursors = [(await store.record(result(sample=i))).cursor for i in (3, 1, 4, 0, 2)]
    assert cursors == sorted(cursors)
    assert min(cursors) > 0
    assert [r.sample for r in await store.results(0, 10)] == [3, 1, 4, 0, 2]
    assert [r.sample for r in await store.results(cursors[1], 2)] == [4, 0]
    assert await store.results(cursors[-1], 10) == []
    assert await store.results(cursors[-1] + 100, 10) == []


async def test_concurrent_records_return_in_the_order_of_the_cursors(store: SqlStore) -> None:
    await store.submit([group("g", samples=300)])
    known: list[int] = []

    async def record(sample: int) -> None:
        if sample % 7 == 0:
            await asyncio.sleep(0)
        known.append((await store.record(result(sample=sample))).cursor)

    await asyncio.gather(*(record(sample) for sample in range(300)))
    assert known == list(range(1, 301))


async def test_a_batch_is_kept_with_its_groups(store: SqlStore) -> None:
    await store.open_batch(
        StoredBatch(BatchRequest(id="a", groups=1, stream_open=True), "tenant", closed=False)
    )
    await store.submit([replace(group("a/0"), batch_id="a", weight_version=3), group("other/0")])
    more = [BatchTask(task={"id": str(i)}) for i in range(3)]
    await store.extend_batch("a", 0, more[:2], closed=False)
    await store.extend_batch("a", 2, more[2:], closed=True)
    await store.record(result("a/0"))
    [(batch, [first])] = await store.batches()
    assert (batch.appended, batch.closed, batch.cancelled_at) == (tuple(more), True, None)
    assert (batch.tenant, batch.request.groups) == ("tenant", 1)
    assert (first.request.id, first.batch_id, first.weight_version) == ("a/0", "a", 3)
    assert await store.cancel_batch("a") == 1
    carrying = StoredBatch(BatchRequest(id="b", groups=1), "tenant", carried=("a/0",), dropped=2)
    await store.open_batch(carrying)
    [(cancelled, none), (batch, [carried])] = await store.batches()
    assert (cancelled.cancelled_at, none) == (1, [])
    assert (batch, carried.request.id, carried.batch_id) == (carrying, "a/0", "b")


async def test_a_batch_does_not_take_the_ids_of_groups(store: SqlStore) -> None:
    await store.submit([group("a/12"), group("b/c/0"), group("b/x"), group("b/01")])
    with pytest.raises(Conflict, match="a/<index>"):
        await store.open_batch(StoredBatch(BatchRequest(id="a", groups=1), "a"))
    await store.open_batch(StoredBatch(BatchRequest(id="b", groups=1), "b"))


async def test_the_groups_of_a_batch_stay_as_long_as_it_does(make_store: MakeStore) -> None:
    store = make_store(max_results=1)
    await store.open_batch(StoredBatch(BatchRequest(id="a", groups=1), "a"))
    await store.submit([replace(group(f"a/{i}", samples=1), batch_id="a") for i in range(3)])
    for i in range(3):
        await read(store, result(f"a/{i}"))
    [(_, groups)] = await store.batches()
    assert [(one.request.id, one.complete) for one in groups] == [(f"a/{i}", True) for i in range(3)]
    await store.drop_batch("a")
    assert await store.batches() == []
    for name in ("a/0", "a/1"):
        with pytest.raises(NotFound):
            await store.group(name)
    assert (await store.group("a/2")).batch_id is None, "its result is kept"
    await store.submit([group("next", samples=1)])
    await read(store, result("next"))
    with pytest.raises(NotFound):
        await store.group("a/2")


async def test_the_first_result_of_a_job_is_kept(store: SqlStore) -> None:
    await store.submit([group()])
    first = await store.record(result(reward=0.25))
    again = await store.record(result(reward=0.75))
    assert again == first
    assert [r.reward for r in await store.results(0, 10)] == [0.25]


async def test_a_result_is_found_by_its_job(store: SqlStore) -> None:
    await store.submit([group("a/b")])
    kept = await store.record(result("a/b", 1, None))
    assert await store.result("a/b/1") == kept
    for unknown in ("a/b/0", "a/b/2", "a/b/01", "a/b", "1", "", "/", "a/b/١"):
        with pytest.raises(NotFound):
            await store.result(unknown)


async def test_a_group_has_the_outcomes_of_its_jobs(store: SqlStore) -> None:
    await store.submit([group()])
    assert [g.request.id for g in await store.unfinished()] == ["g"]
    await store.record(result(sample=1, reward=None))
    stored = await store.group("g")
    assert [(job.id, job.state, job.failure) for job in stored.jobs] == [
        ("g/0", JobState.QUEUED, None),
        ("g/1", JobState.FAILED, FailureKind.GRADER),
    ]
    assert not stored.complete
    await store.record(result(sample=0))
    assert (await store.group("g")).complete
    assert await store.unfinished() == []


async def test_a_result_of_an_unknown_group_is_refused(store: SqlStore) -> None:
    with pytest.raises(NotFound):
        await store.record(result("nobody"))


async def test_concurrent_results_have_different_cursors(store: SqlStore) -> None:
    await store.submit([group(samples=50)])
    recorded = await asyncio.gather(*(store.record(result(sample=i)) for i in range(50)))
    assert len({r.cursor for r in recorded}) == 50


async def test_the_number_of_kept_results_is_bounded(make_store: MakeStore) -> None:
    store = make_store(max_results=3)
    await store.submit([group(name, samples=2) for name in ("a", "b", "c")])
    cursors = [await read(store, result(name, i)) for name in "abc" for i in range(2)]
    assert [r.job_id for r in await store.results(0, 10)] == ["b/1", "c/0", "c/1"]
    assert await store.results(cursors[2], 10) == await store.results(0, 10)
    with pytest.raises(CursorExpired, match="no longer kept"):
        await store.results(cursors[0], 10)
    with pytest.raises(NotFound, match="no group"):
        await store.group("a")
    with pytest.raises(NotFound, match="no longer kept"):
        await store.result("b/0")
    assert (await store.group("b")).complete


async def test_kept_tokens_are_bounded_but_the_newest_result_is_kept(make_store: MakeStore) -> None:
    store = make_store(max_tokens=100)
    await store.submit([group(samples=4)])
    for sample, tokens in enumerate((40, 60, 30, 500)):
        await read(store, result(sample=sample, tokens=tokens))
        kept = [r.sample for r in await store.results(0, 10)]
        assert kept == [[0], [0, 1], [1, 2], [3]][sample]


async def test_the_tokens_of_a_page_are_bounded_but_it_has_at_least_one_result(store: SqlStore) -> None:
    await store.submit([group(samples=4)])
    for sample, tokens in enumerate((500, 40, 60, 1)):
        await store.record(result(sample=sample, tokens=tokens))
    assert [r.sample for r in await store.results(0, 10, max_tokens=100)] == [0]
    assert [r.sample for r in await store.results(1, 10, max_tokens=100)] == [1, 2]
    assert [r.sample for r in await store.results(1, 10, max_tokens=101)] == [1, 2, 3]


async def test_attempts_are_counted_until_there_is_a_result(store: SqlStore) -> None:
    await store.submit([group()])
    for job, attempts, failures in (("g/1", 1, 0), ("g/1", 2, 1), ("g/0", 1, 0)):
        await store.started(job, attempts, failures)
    assert attempts_of(await store.group("g")) == (1, 2)
    assert (await store.group("g")).failures == (0, 1)
    await store.record(result(sample=1).model_copy(update={"attempts": 2}))
    [unfinished] = await store.unfinished()
    assert attempts_of(unfinished) == (1, 2)
    for unknown in ("g/2", "h/0", "g"):
        with pytest.raises(NotFound):
            await store.started(unknown, 1, 0)


async def test_requests_are_equal_for_any_order_of_their_keys(store: SqlStore) -> None:
    await store.submit([group(metadata={"a": 1, "b": 2})])
    assert await store.submit([group(metadata={"b": 2, "a": 1})]) == [False]


async def test_a_refused_write_does_not_undo_concurrent_ones(store: SqlStore) -> None:
    await store.submit([group("a")])
    outcomes = await asyncio.gather(
        store.submit([group("b")]),
        store.submit([group("c"), group("a", samples=3)]),
        store.record(result("nobody")),
        store.record(result("a")),
        return_exceptions=True,
    )
    assert outcomes[0] == [True]
    assert isinstance(outcomes[1], Conflict) and isinstance(outcomes[2], NotFound)
    assert [r.job_id for r in await store.results(0, 10)] == ["a/0"]
    assert [g.request.id for g in await store.unfinished()] == ["a", "b"]


async def test_a_reader_can_filter_results(store: SqlStore) -> None:
    await store.submit([group("a"), group("b", environment="other"), group("c")])
    for group_id, environment, reward in (
        ("a", "toy", 1.0),
        ("b", "other", 1.0),
        ("c", "toy", None),
        ("b", "other", None),
        ("a", "toy", 0.0),
    ):
        sample = len([r for r in await store.results(0, 10) if r.group_id == group_id])
        given = result(group_id, sample, reward).model_copy(update={"environment": environment})
        await store.record(given)

    async def cursors(after: int = 0, limit: int = 10, **wanted: set[str]) -> list[int]:
        only = Selection(**{name: frozenset(values) for name, values in wanted.items()})  # type: ignore[arg-type]
        return [r.cursor for r in await store.results(after, limit, only=only)]

    assert await store.newest() == 5
    assert await cursors() == [1, 2, 3, 4, 5]
    assert await cursors(groups={"a", "c"}) == [1, 3, 5]
    assert await cursors(after=1, limit=1, groups={"a", "c"}) == [3]
    assert await cursors(environments={"other"}) == [2, 4]
    assert await cursors(states={JobState.FAILED}) == [3, 4]
    assert await cursors(groups={"b"}, environments={"other", "none"}, states={JobState.FAILED}) == [4]
    assert await cursors(groups={"none"}) == []


async def test_the_newest_cursor_of_an_empty_store_is_0(store: SqlStore) -> None:
    assert await store.newest() == 0


async def dropped_in_turn(store: SqlStore, *jobs: tuple[str, int, str]) -> None:
    """Store and read results in a store that keeps only one result."""
    for name, environment in sorted({(name, environment) for name, _, environment in jobs}):
        await store.submit([group(name, samples=9, environment=environment)])
    for name, sample, environment in jobs:
        await read(store, result(name, sample).model_copy(update={"environment": environment}))
    await store.put_value("written", "")  # with the last acknowledgement


async def test_a_cursor_expires_only_for_readers_whose_results_were_dropped(make_store: MakeStore) -> None:
    store = make_store(max_results=1)
    await dropped_in_turn(
        store,
        ("alice/a", 0, "toy"),  # cursor 1, read by its reader
        ("bob/a", 0, "other"),
        ("bob/a", 1, "other"),
        ("alice/a", 1, "toy"),  # cursor 4, the one that is kept
    )
    for mine in (
        Selection(prefix="alice/"),
        Selection(groups=frozenset({"alice/a"})),
        Selection(environments=frozenset({"toy"})),
        Selection(states=frozenset({JobState.FAILED})),
    ):
        expected = [] if mine.states else ["alice/a/1"]
        assert [r.job_id for r in await store.results(1, 10, only=mine)] == expected
    for lost in (
        Selection(),
        Selection(prefix="bob/"),
        Selection(groups=frozenset({"alice/a", "bob/a"})),
        Selection(environments=frozenset({"other"})),
        Selection(states=frozenset({JobState.DONE})),
        Selection(prefix="bob/", states=frozenset({JobState.DONE})),
    ):
        with pytest.raises(CursorExpired, match="up to 3, are no longer kept"):
            await store.results(1, 10, only=lost)
    assert [r.job_id for r in await store.results(3, 10, only=Selection(prefix="bob/"))] == []


async def test_a_cursor_expires_also_after_the_dropped_group_is_forgotten(make_store: MakeStore) -> None:
    store = make_store(max_results=1)
    await store.submit([group("gone", samples=1), group("g")])
    for new in (result("g"), result("gone"), result("g", 1)):
        await read(store, new)
    with pytest.raises(NotFound):
        await store.group("gone")
    with pytest.raises(CursorExpired):
        await store.results(1, 10, only=Selection(groups=frozenset({"gone"})))


async def test_results_that_were_dropped_long_ago_expire_the_cursors_of_all(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("base", "sql"):
        monkeypatch.setattr(f"prorl_envs.rollout.store.{module}.KNOWN_DROPPED", 2)
    monkeypatch.setattr("prorl_envs.rollout.store.sql._FORGET_EVERY", 1)
    store, mine = make_store(max_results=2), Selection(prefix="alice/")
    await dropped_in_turn(store, *[("bob", sample, "toy") for sample in range(6)], ("alice/a", 0, "toy"))
    with pytest.raises(CursorExpired, match="up to 3,"):
        await store.results(2, 10, only=mine)
    assert [r.job_id for r in await store.results(3, 10, only=mine)] == ["alice/a/0"]


async def test_unread_results_are_counted(store: SqlStore) -> None:
    await store.submit([group(samples=3)])
    for sample, tokens in enumerate((40, 2, 0)):
        await store.record(result(sample=sample, tokens=tokens))
    assert store.unread == UnreadResults(3, 42)
    store.acknowledge([1, 3, 99])
    store.acknowledge([1])
    await store.put_value("written", "")
    assert store.unread == UnreadResults(1, 2)
    await store.record(result(sample=0))
    assert store.unread == UnreadResults(1, 2), "a repeated result is not another one"


async def test_a_reader_finds_the_cursors_of_its_results(store: SqlStore) -> None:
    await store.submit([group("a", samples=3), group("b")])
    for new in (result("a"), result("b"), result("a", 1), result("a", 2)):
        await store.record(new)
    assert await store.cursors(0, 9) == [1, 2, 3, 4]
    assert await store.cursors(1, 3, Selection(groups=frozenset({"a"}))) == [3]
