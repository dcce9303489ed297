"""One short run of every fault; `make faults` runs longer."""

import asyncio

import pytest

from faults.scenarios import SCENARIOS
from faults.world import new_world

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_job_is_lost_or_duplicated_and_no_resource_leaked(name: str) -> None:
    play(name, scale=1)


def test_a_service_survives_six_kills() -> None:
    play("service_killed", scale=2)


def play(name: str, scale: int) -> None:
    with new_world(11, scale) as world:
        asyncio.run(SCENARIOS[name](world))
    assert world.jobs
