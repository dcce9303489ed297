"""At most one caller per iteration of the event loop."""

import asyncio
import itertools

import pytest

from prorl_envs.rollout.agent.fair_yield import LoopFairness

pytestmark = pytest.mark.anyio


async def rounds(passed: list[str]) -> None:
    """Count the iterations of the loop until cancelled."""
    while True:
        passed.append("round")
        await asyncio.sleep(0)


async def test_one_caller_per_iteration_in_order() -> None:
    turnstile, passed = LoopFairness(), list[str]()

    async def come(name: str) -> None:
        await turnstile.through()
        passed.append(name)

    noting = asyncio.create_task(rounds(passed))
    await asyncio.gather(*(come(name) for name in "abcdefgh"))
    noting.cancel()
    assert "".join(name for name in passed if name != "round") == "abcdefgh"
    came = [index for index, name in enumerate(passed) if name != "round"]
    assert all("round" in passed[first:then] for first, then in itertools.pairwise(came)), passed


async def test_a_single_caller_does_not_wait() -> None:
    turnstile = LoopFairness()
    for _ in range(3):
        coming = turnstile.through()
        try:
            coming.send(None)
        except StopIteration:
            await asyncio.sleep(0)
        else:
            raise AssertionError("it waits, and nobody was before it in this round")


async def test_a_cancelled_caller_does_not_block_others() -> None:
    turnstile = LoopFairness()
    await turnstile.through()
    tasks = [asyncio.create_task(turnstile.through()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:3]:
        task.cancel()
    async with asyncio.timeout(30):
        await tasks[3]
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    async with asyncio.timeout(30):  # the next iteration starts with a new count
        await asyncio.sleep(0.01)
        await turnstile.through()
