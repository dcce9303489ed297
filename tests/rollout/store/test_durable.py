"""Further promises of durable stores, about restarts and closing."""

import asyncio
import random
import sqlite3
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampled, VersionSpan
from prorl_envs.rollout.api.errors import CursorExpired, NotFound, Unavailable
from prorl_envs.rollout.api.types import JobState, Result, Trajectory, TurnRecord
from prorl_envs.rollout.store.base import UnreadResults
from tests.rollout.conftest import OpenStore
from tests.rollout.store.test_store import attempts_of, group, read, result

pytestmark = pytest.mark.anyio


def with_numbers(ids: list[int], logprobs: list[float]) -> Result:
    turn = TurnRecord(
        start=0, end=1, finish_reason="stop", weight_version="7", server="s", model_s=0.1, tools_s=0
    )
    trajectory = Trajectory(ids=ids, loss_mask=[1] * len(ids), logprobs=logprobs, turns=[turn])
    whole = {"evidence": {"a": [1, 2.5, None]}, "messages": [{"role": "tool", "content": "ä\0"}]}
    return result().model_copy(update={"trajectory": trajectory, "metadata": {"big": 2**80}, **whole})


async def test_everything_survives_a_restart(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group("a"), group("b")])
        await store.started("b/1", 1, 0)
        kept = [await store.record(result("a", i, tokens=9)) for i in range(2)]
    async with opened() as store:
        assert await store.submit([group("a")]) == [False]
        assert await store.results(0, 10) == kept
        assert (await store.group("a")).complete
        [unfinished] = await store.unfinished()
        assert (unfinished.request.id, attempts_of(unfinished)) == ("b", (0, 1))
        assert (await store.record(result("b"))).cursor > kept[-1].cursor


async def test_turns_are_kept_until_the_result_of_their_job(opened: OpenStore) -> None:
    span = VersionSpan(version="6", start=0, end=1)
    answer = Sampled((5, 2**17), (-0.1, -1e-9), "length", "6", "http://s", (span,), cached_tokens=3)
    async with opened() as store:
        await store.submit([group("a"), group("b")])
        for history in (b"\0first", b"second"):
            store.note_turn("a/0", history, answer)
        store.note_turn("a/0", b"second", replace(answer, ids=(1,)))  # the first answer counts
        store.note_turn("a/1", b"other", answer)
        store.note_turn("unknown/0", b"first", answer)
    async with opened() as store:
        assert await store.turns("a/0") == {b"\0first": answer, b"second": answer}
        await store.record(result("a", 0))
        store.note_turn("a/0", b"late", answer)
        await store.record(result("b", 0))
        assert (await store.turns("a/0"), await store.turns("b/0")) == ({}, {})
        assert list(await store.turns("a/1")) == [b"other"]


async def test_a_start_that_may_wait_is_written_with_the_next_write(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group(samples=3)])
        await store.started("g/0", 1, 0, at_once=False)
        await store.started("g/1", 1, 0, at_once=False)
        assert attempts_of(await store.group("g")) == (0, 0, 0)
        await store.record(result(sample=2))
        assert attempts_of(await store.group("g"))[:2] == (1, 1)


async def test_a_start_that_may_wait_is_written_soon_without_another_write(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group()])
        await store.started("g/0", 1, 0, at_once=False)
        while attempts_of(await store.group("g")) == (0, 0):  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)


async def test_a_start_that_may_wait_is_written_when_the_store_is_closed(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group()])
        await store.started("g/0", 1, 0, at_once=False)
    async with opened() as store:
        assert attempts_of(await store.group("g")) == (1, 0)


async def test_a_start_is_written_even_if_the_write_in_its_transaction_is_refused(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group()])
        await store.started("g/0", 1, 0, at_once=False)
        with pytest.raises(NotFound):
            await store.started("unknown/0", 1, 0)
        assert attempts_of(await store.group("g")) == (1, 0)


async def test_concurrent_starts_are_all_counted(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group(str(number), samples=4) for number in range(20)])

        async def job(number: int, sample: int) -> None:
            await store.started(f"{number}/{sample}", 1, 0, at_once=False)
            await asyncio.sleep(0.001 * (number % 3))
            await store.started(f"{number}/{sample}", 2, 1, at_once=bool(sample % 2))
            if sample == 3:
                await store.record(result(str(number), sample))
            if sample == 2:
                await store.submit([group(f"more{number}")])

        await asyncio.gather(*(job(number, sample) for number in range(20) for sample in range(4)))
    async with opened() as store:
        for stored in await store.unfinished():
            if not stored.request.id.startswith("more"):
                assert attempts_of(stored)[:3] == (2, 2, 2)


async def test_a_named_value_is_the_last_one_written(opened: OpenStore) -> None:
    async with opened() as store:
        assert await store.get_value("a") is None
        for value in ("1", "é\n2"):
            await store.put_value("a", value)
        await store.put_value("b", "")
    async with opened() as store:
        assert [await store.get_value(name) for name in "abc"] == ["é\n2", "", None]


async def test_bounds_hold_over_a_restart(opened: OpenStore) -> None:
    async with opened(max_tokens=100) as store:
        await store.submit([group(samples=5)])
        for sample in range(3):
            await read(store, result(sample=sample, tokens=40))
    async with opened(max_tokens=100) as store:
        assert [r.sample for r in await store.results(0, 10)] == [1, 2]
        await read(store, result(sample=3, tokens=40))
        assert [r.cursor for r in await store.results(0, 10)] == [3, 4]
        with pytest.raises(CursorExpired):
            await store.results(1, 10)
    async with opened(max_results=1) as store:
        assert (await store.record(result(sample=4))).cursor == 5
        assert [r.cursor for r in await store.results(0, 10)] == [5]
        assert (await store.group("g")).complete


async def test_results_over_a_lower_bound_are_dropped_at_once(opened: OpenStore) -> None:
    async with opened() as store:
        await store.submit([group(samples=60)])
        for sample in range(50):
            await read(store, result(sample=sample))
    async with opened(max_results=2) as store:
        await store.record(result(sample=50))
        assert [r.sample for r in await store.results(49, 100)] == [49, 50]
        with pytest.raises(CursorExpired):
            await store.results(48, 100)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([0, 1, 255], [0.0, -0.5, -1.25]),
        ([0, 151_643, 2**32], [-0.1, -1e-300, -1e300]),
        ([-1, 2**63 - 1], [float("-inf"), 0.0]),
        ([], []),
    ],
)
async def test_numbers_are_read_as_written(opened: OpenStore, ids: list[int], logprobs: list[float]) -> None:
    async with opened() as store:
        await store.submit([group()])
        kept = await store.record(with_numbers(ids, logprobs))
        assert (
            await store.result("g/0") == kept == with_numbers(ids, logprobs).model_copy(update={"cursor": 1})
        )


async def test_a_closed_store_raises(opened: OpenStore) -> None:
    async with opened() as store:
        writing = asyncio.create_task(store.submit([group()]))
        await asyncio.sleep(0)
        await store.aclose()
        assert await writing == [True], "what was asked for before is done"
    with pytest.raises(Unavailable, match="closed"):
        await store.submit([group()])


async def test_a_stopped_service_leaves_unfinished_jobs_to_the_next(
    make_bench: Any, opened: OpenStore
) -> None:
    async with opened() as store:
        bench = await make_bench(kept_in=store, run=1, max_jobs_with_sandbox=1)
        bench.world.gates["call"] = asyncio.Event()
        await bench.submit(bench.group("done", samples=2))
        await bench.world.until(lambda: bench.world.inside["call"] == 1)
        await bench.service.groups.cancel_job("done/1")
        await bench.submit(bench.group("waits"))
        await bench.service.stop()
        assert bench.world.open == 0
        assert [r.job_id for r in await store.results(0, 10)] == ["done/1"]
    async with opened() as store:
        bench = await make_bench(kept_in=store)
        results = {r.job_id: r for r in await bench.finished(3)}
        states = {job: r.state for job, r in results.items()}
        assert states == {
            "done/0": JobState.DONE,
            "done/1": JobState.CANCELLED,
            "waits/0": JobState.DONE,
        }
        assert results["done/0"].attempts == 2, "the one that the stop interrupted counts"
        assert results["waits/0"].attempts == 1
        await bench.service.stop()


async def test_a_store_has_one_service(opened: OpenStore) -> None:
    async with opened() as store:
        with pytest.raises(InputError, match="open in another service"):
            async with opened():
                pass
        assert await store.submit([group()]) == [True]
    async with opened() as store:
        assert len(await store.unfinished()) == 1


# Results that nobody has read.


@pytest.mark.parametrize("bounds", [{"max_results": 2}, {"max_tokens": 20}])
async def test_unread_results_are_not_dropped_and_read_ones_are(
    opened: OpenStore, bounds: dict[str, Any]
) -> None:
    async with opened(**bounds) as store:
        await store.submit([group(samples=40)])
        for sample in range(36):
            await store.record(result(sample=sample, tokens=10))
        assert [r.sample for r in await store.results(0, 100)] == list(range(36))
        store.acknowledge([3, 5])
        await store.record(result(sample=36, tokens=10))
        kept = [cursor for cursor in range(1, 38) if cursor not in (3, 5)]
        assert [r.cursor for r in await store.results(0, 100)] == kept
        store.acknowledge(range(1, 38))
        await store.record(result(sample=37, tokens=10))
        assert [r.cursor for r in await store.results(0, 100)] == [37, 38]
        assert store.unread == UnreadResults(1, 10)


async def test_unread_results_stay_unread_over_a_restart(opened: OpenStore) -> None:
    async with opened(max_results=1) as store:
        await store.submit([group(samples=6)])
        for sample in range(4):
            await store.record(result(sample=sample, tokens=5))
        store.acknowledge([2])
    async with opened(max_results=1) as store:
        assert store.unread == UnreadResults(3, 15)
        await store.record(result(sample=4))
        assert [r.cursor for r in await store.results(0, 10)] == [1, 3, 4, 5]
        with pytest.raises(CursorExpired):
            await store.results(1, 10)


async def test_an_acknowledgement_is_written_again_if_the_database_failed(opened: OpenStore) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("out of luck")

    async with opened(max_results=1) as store:
        await store.submit([group(samples=3)])
        await store.record(result())
        store.acknowledge([1])
        with pytest.raises(Unavailable):
            await store._write(fail)
        assert store.unread.results == 1
        await store.record(result(sample=1))
        assert [r.cursor for r in await store.results(0, 10)] == [2]
        assert store.unread.results == 1, "the failed transaction is not counted"


async def test_the_closed_store_does_not_wait_for_an_acknowledgement_that_fails(opened: OpenStore) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("out of luck")

    async with opened() as store:
        await store.submit([group()])
        await store.record(result())
        store.acknowledge([1])
        store._write_with_others(fail)
        await asyncio.wait_for(store.aclose(), 60)


async def test_many_results_are_dropped_in_several_transactions(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_envs.rollout.store.sql._MAX_TRIMS", 1)
    async with opened(max_results=1) as store:
        await store.submit([group(samples=100)])
        for sample in range(100):
            await store.record(result(sample=sample))
        store.acknowledge(range(1, 101))
        left = []
        for _ in range(6):
            await store.put_value("written", "")
            left.append(len(await store.results(0, 100)))
    assert 1 < left[0] < 100
    assert left == sorted(left, reverse=True)
    assert left[-1] == 1


@pytest.mark.parametrize("seed", range(6))
async def test_no_sequence_of_reads_and_restarts_drops_an_unread_result(opened: OpenStore, seed: int) -> None:
    """Compare the store with a model of its content: every unread result, and the newest read results."""
    chance = random.Random(seed)
    bounds = {"max_results": chance.randint(1, 9), "max_tokens": chance.randint(1, 300)}
    tokens: dict[int, int] = {}  # by cursor
    unread: set[int] = set()
    jobs = [(f"g{number}", sample) for number in range(40) for sample in range(3)]
    chance.shuffle(jobs)

    def newest() -> set[int]:
        """Return the results within the bounds."""
        kept, left = set[int](), bounds["max_tokens"]
        for cursor in sorted(tokens, reverse=True)[: bounds["max_results"]]:
            left -= tokens[cursor]
            if kept and left < 0:
                break
            kept.add(cursor)
        return kept

    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(**bounds))
        await store.submit([group(f"g{number}", samples=3) for number in range(40)])
        while jobs:
            match chance.choice(["record"] * 6 + ["acknowledge"] * 3 + ["restart"]):
                case "record":
                    name, sample = jobs.pop()
                    size = chance.choice([0, 1, 40, 120])
                    cursor = (await store.record(result(name, sample, tokens=size))).cursor
                    tokens[cursor] = size
                    unread.add(cursor)
                case "acknowledge":
                    some = chance.sample(sorted(unread), chance.randint(0, len(unread)))
                    store.acknowledge([*some, 1, 10_000] if 1 not in unread else some)
                    unread -= set(some)
                    await store.put_value("written", "")
                case _:
                    await stack.aclose()
                    store = await stack.enter_async_context(opened(**bounds))
            there = {r.cursor: r for r in await store.results(0, 1000)}
            assert unread <= set(there), "an unread result is gone"
            assert set(there) == unread | newest() & set(tokens), "read results over the bounds are dropped"
            assert store.unread == UnreadResults(len(unread), sum(tokens[cursor] for cursor in unread))
            for one in there.values():
                assert (await store.group(one.group_id)).request.id == one.group_id
                assert await store.result(one.job_id) == one
