"""One caller a round of the event loop."""

import asyncio
import itertools

import pytest

from prorl_envs.rollout.turnstile import Turnstile

pytestmark = pytest.mark.anyio


async def rounds(passed: list[str]) -> None:
    """Note each round of the loop until it is cancelled."""
    while True:
        passed.append("round")
        await asyncio.sleep(0)


async def test_one_a_round_and_in_order() -> None:
    turnstile, passed = Turnstile(), list[str]()

    async def come(name: str) -> None:
        await turnstile.through()
        passed.append(name)

    noting = asyncio.create_task(rounds(passed))
    await asyncio.gather(*(come(name) for name in "abcdefgh"))
    noting.cancel()
    assert "".join(name for name in passed if name != "round") == "abcdefgh"
    came = [index for index, name in enumerate(passed) if name != "round"]
    assert all("round" in passed[first:then] for first, then in itertools.pairwise(came)), passed


async def test_who_comes_alone_does_not_wait() -> None:
    turnstile = Turnstile()
    for _ in range(3):
        coming = turnstile.through()
        try:
            coming.send(None)
        except StopIteration:
            await asyncio.sleep(0)
        else:
            raise AssertionError("it waits, and nobody was before it in this round")


async def test_who_gives_up_keeps_nobody_waiting() -> None:
    turnstile = Turnstile()
    await turnstile.through()
    tasks = [asyncio.create_task(turnstile.through()) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:3]:
        task.cancel()
    async with asyncio.timeout(5):
        await tasks[3]
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    async with asyncio.timeout(5):  # and the next round begins anew
        await asyncio.sleep(0.01)
        await turnstile.through()
