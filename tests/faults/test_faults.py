"""One small round of every fault; `make faults` does more of them, for as long as one likes."""

import asyncio

import pytest

from faults.scenarios import SCENARIOS
from faults.world import new_world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_nothing_comes_twice_nothing_is_left(name: str) -> None:
    play(name, scale=1)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_service_killed_six_times() -> None:
    play("service_killed", scale=2)


def play(name: str, scale: int) -> None:
    with new_world(11, scale) as world:
        asyncio.run(SCENARIOS[name](world))
    assert world.jobs
