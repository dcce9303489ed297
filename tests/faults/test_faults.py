"""One small round of every fault; `make faults` does more of them, for as long as one likes."""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.scenarios import SCENARIOS
from faults.world import World

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

#: Six kills of the service, since what goes wrong there goes wrong rarely.
SCALE = {"service_killed": 2}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory with a short path, since sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="prf-")).resolve()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_nothing_is_lost_nothing_comes_twice_nothing_is_left(name: str, folder: Path) -> None:
    world = World(folder, random.Random(11), SCALE.get(name, 1))
    await SCENARIOS[name](world)
    assert world.jobs
