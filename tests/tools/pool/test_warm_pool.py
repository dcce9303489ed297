"""Warm pool of sandboxes. The leak fixture checks each test."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from prorl_envs.errors import NoRoom, SandboxError
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client.connection import ENTRY
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.pool.warm_pool import WarmPool

pytestmark = pytest.mark.anyio

PLAIN = SandboxSpec()
OTHER = SandboxSpec(hostname="other")


class CountingDriver:
    """Real driver that records its starts, and can be made to fail."""

    name = "counting"

    def __init__(self, driver: BubblewrapDriver) -> None:
        self._driver = driver
        self.started: list[Sandbox] = []
        self.at_once = self.most_at_once = 0
        self.failing = False
        self.room = 1 << 30
        self.changed = asyncio.Event()

    @property
    def sandboxes(self) -> Collection[Sandbox]:
        return self._driver.sandboxes

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.failing:
                raise SandboxError("no more sandboxes today")
            if len(self.sandboxes) >= self.room:
                raise NoRoom("no more processes")
            self.started.append(await self._driver.start(spec))
        finally:
            self.at_once -= 1
            self.changed.set()
        return self.started[-1]

    async def aclose(self) -> None:
        """Do nothing: the driver's fixture closes it."""


async def closed(sandbox: Sandbox) -> None:
    """Wait until the sandbox has been closed, which closes the socket of its tool server."""
    if sandbox.alive:
        with await sandbox.spawn(ENTRY) as sock:
            await asyncio.get_running_loop().sock_recv(sock, 1)


@pytest.fixture
def driver(shared_driver: BubblewrapDriver) -> CountingDriver:
    return CountingDriver(shared_driver)


@pytest.fixture
async def pool(driver: CountingDriver, run_dir: Path) -> AsyncIterator[WarmPool]:
    pool = WarmPool(driver, limit=3)
    yield pool
    await pool.aclose()


async def use(pool: WarmPool, spec: SandboxSpec = PLAIN, times: int = 1) -> None:
    """Take several sandboxes concurrently, close them, and wait until the pool has adjusted."""
    places = await asyncio.gather(*(pool.take(spec) for _ in range(times)))
    for place in places:
        await place.aclose()
    await asyncio.wait_for(pool.settled(), 30)


async def test_after_two_uses_a_sandbox_is_ready_for_the_third(
    pool: WarmPool, driver: CountingDriver
) -> None:
    await use(pool)
    assert pool.ready == 0
    await use(pool)
    assert pool.ready == 1
    ready = [sandbox for sandbox in driver.started if sandbox.alive]
    place = await pool.take(PLAIN)
    assert [place.sandbox] == ready
    answer = await place.tools.bash("echo $?; pwd; ls -A; set | grep -c __", timeout_s=20)
    assert answer.text.startswith("0\n/workspace\n")
    await place.aclose()


async def test_each_sandbox_is_handed_out_once(pool: WarmPool) -> None:
    await use(pool, times=4)
    assert pool.ready == 3
    places = await asyncio.gather(*(pool.take(PLAIN) for _ in range(6)))
    assert len({place.sandbox.id for place in places}) == 6
    for number, place in enumerate(places):
        await place.tools.write("/workspace/own", str(number).encode())
    for number, place in enumerate(places):
        assert await place.tools.read("/workspace/own") == str(number).encode()
        await place.aclose()


async def test_a_start_waits_for_the_close_of_another_sandbox_if_the_machine_has_no_room(
    pool: WarmPool, driver: CountingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.room = len(driver.sandboxes) + 2
    first, second = [await pool.take(PLAIN) for _ in range(2)]
    waiting = [asyncio.create_task(pool.take(PLAIN)) for _ in range(2)]
    driver.changed.clear()
    await driver.changed.wait()
    assert (pool.starting, [task.done() for task in waiting]) == (2, [False, False])
    for session in (first, second):
        await session.aclose()
    for session in await asyncio.gather(*waiting):
        assert (await session.tools.bash("echo on", timeout_s=20)).text == "on\n"
        await session.aclose()
    assert [record.message for record in caplog.records if "wait until others close" in record.message] == [
        "sandboxes wait until others close: no more processes"
    ]


async def test_idle_sandboxes_make_room_for_those_that_wait(pool: WarmPool, driver: CountingDriver) -> None:
    await use(pool, PLAIN, times=2)
    driver.room = len(driver.sandboxes)
    assert pool.ready == 2
    for spec in (OTHER, OTHER):
        session = await asyncio.wait_for(pool.take(spec), 20)
        await session.aclose()


async def test_without_other_sandboxes_no_room_is_an_error(pool: WarmPool, driver: CountingDriver) -> None:
    if driver.sandboxes:
        pytest.skip("the shared driver has sandboxes")
    driver.room = 0
    with pytest.raises(NoRoom):
        await pool.take(PLAIN)


async def test_another_kind_is_not_handed_out(pool: WarmPool) -> None:
    await use(pool, PLAIN, times=2)
    assert pool.ready == 2
    place = await pool.take(OTHER)
    assert (await place.tools.bash("hostname", timeout_s=20)).text == "other\n"
    assert pool.ready == 2
    await place.aclose()
    with_python = await pool.take(PLAIN, python=PythonEngine.FORKED)
    assert (await with_python.tools.python("1 + 1", timeout_s=20)).text == "2\n"
    await with_python.aclose()


async def test_current_demand_displaces_older_demand(pool: WarmPool, driver: CountingDriver) -> None:
    await use(pool, PLAIN, times=3)
    assert pool.ready == 3
    await use(pool, OTHER, times=3)
    assert pool.ready == 3
    await use(pool, PLAIN)
    count = len(driver.started)
    places = await asyncio.gather(*(pool.take(OTHER) for _ in range(3)))
    assert all(place.sandbox in driver.started[:count] for place in places)
    for place in places:
        await place.aclose()


async def test_a_dead_sandbox_is_not_handed_out(pool: WarmPool, driver: CountingDriver) -> None:
    await use(pool, times=2)
    assert pool.ready == 2
    for sandbox in driver.started:
        await sandbox.close()
    place = await pool.take(PLAIN)
    assert place.sandbox.alive
    assert (await place.tools.bash("echo here", timeout_s=20)).text == "here\n"
    await place.aclose()


async def test_unused_sandboxes_are_closed_after_a_while(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=3, memory_s=0.5)
    await use(pool, times=3)
    ended = [asyncio.create_task(closed(sandbox)) for sandbox in driver.started]
    assert len(ended) == 6
    await asyncio.wait_for(asyncio.gather(*ended), 30)
    assert pool.ready == 0
    await pool.aclose()


async def test_a_failing_driver_is_not_called_repeatedly(
    pool: WarmPool, driver: CountingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    await use(pool, times=2)
    assert pool.ready == 2
    driver.failing = True
    driver.changed.clear()
    places = [await pool.take(PLAIN), await pool.take(PLAIN)]
    await asyncio.wait_for(driver.changed.wait(), 30)
    with pytest.raises(SandboxError, match="no more sandboxes"):
        await pool.take(PLAIN)
    await asyncio.sleep(0)
    assert caplog.text.count("could not be started") <= 2
    for place in places:
        await place.aclose()


async def test_without_a_limit_no_sandbox_is_kept_ready(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=0)
    await use(pool, times=3)
    assert len(driver.started) == 3
    assert pool.ready == 0
    await pool.aclose()


async def test_closing_during_a_start_leaks_nothing(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=3)
    await use(pool, times=3)
    await asyncio.sleep(0)
    await pool.aclose()
    await pool.aclose()
    assert not any(sandbox.alive for sandbox in driver.started)
    place = await pool.take(PLAIN)  # the driver still serves it
    await place.aclose()


async def test_a_session_whose_tools_fail_leaks_no_sandbox(driver: CountingDriver) -> None:
    opening = asyncio.create_task(
        SandboxSession.open(driver, PLAIN, python=PythonEngine.FORKED)
    )  # waits for `changed`
    await driver.changed.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not driver.started[0].alive


async def test_the_number_of_concurrent_starts_is_limited(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=0, max_concurrent_starts=2)
    asked = [asyncio.create_task(pool.take(PLAIN)) for _ in range(6)]
    await asyncio.sleep(0)
    assert (pool.starting, pool.waiting) == (2, 4)
    asked.pop().cancel()
    for place in await asyncio.gather(*asked):
        await place.aclose()
    assert (driver.most_at_once, len(driver.started)) == (2, 5)
    driver.failing = True
    for _ in range(3):
        with pytest.raises(SandboxError):
            await pool.take(PLAIN)
    assert (pool.starting, pool.waiting) == (0, 0)
    await pool.aclose()
