"""One small round of every fault; `make faults` does more of them, for as long as one likes."""

import asyncio

import pytest

from faults.scenarios import SCENARIOS
from faults.world import new_world

#: Six kills of the service, since what goes wrong there goes wrong rarely.
SCALE = {"service_killed": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_nothing_comes_twice_nothing_is_left(name: str) -> None:
    with new_world(11, SCALE.get(name, 1)) as world:
        asyncio.run(SCENARIOS[name](world))
    assert world.jobs
