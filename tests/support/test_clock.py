"""The fake clock has the behaviour of a real clock, but its time changes only when a test advances it."""

import asyncio

import pytest

from prorl_envs.clock import Clock
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


async def test_the_clock_implements_the_protocol() -> None:
    assert isinstance(FakeClock(), Clock)
    assert FakeClock(start=5.0).monotonic() == 5.0


async def test_sleepers_wake_in_order_of_their_deadlines() -> None:
    clock, woken = FakeClock(), list[str]()

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3.0), ("soon", 1.0), ("mid", 2.0)):
            group.create_task(sleeper(name, seconds))
        await clock.wait_for_sleepers(3)
        assert clock.sleeping == (1.0, 2.0, 3.0)
        clock.advance(0.5)
        assert clock.sleeping == (1.0, 2.0, 3.0)
        clock.advance(5.0)
    assert woken == ["soon", "mid", "late"]
    assert not clock.sleeping


async def test_sleeping_for_no_time_does_not_wait() -> None:
    await FakeClock().sleep(0)


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = FakeClock()
    task = asyncio.ensure_future(clock.sleep(1.0))
    await clock.wait_for_sleepers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not clock.sleeping
    clock.advance(2.0)


async def test_timeouts_use_the_same_time() -> None:
    clock = FakeClock()

    async def wait() -> None:
        async with clock.timeout(2.0):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(wait())
    await clock.wait_for_sleepers()
    clock.advance(2.0)
    with pytest.raises(TimeoutError):
        await task


async def test_a_block_that_finishes_in_time_leaves_no_timeout() -> None:
    clock = FakeClock()
    async with clock.timeout(2.0), clock.timeout(None):
        assert clock.sleeping == (2.0,)
    assert not clock.sleeping
    clock.advance(3.0)


async def test_cancellation_from_outside_stays_a_cancellation() -> None:
    clock = FakeClock()

    async def wait() -> None:
        async with clock.timeout(2.0):
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(wait())
    await clock.wait_for_sleepers()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
