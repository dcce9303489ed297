"""Sandboxes that stand ready. The leak fixture watches each test."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.sandbox.snapshot import Snapshot
from prorl_envs.tools.link import ENTRY
from prorl_envs.tools.pool import WarmPool
from prorl_envs.tools.workplace import Workplace

pytestmark = pytest.mark.anyio

PLAIN = SandboxSpec()
OTHER = SandboxSpec(hostname="other")


class CountingDriver:
    """The real driver, with a look at what it starts and a fault to switch on."""

    name = "counting"

    def __init__(self, driver: NamespaceDriver) -> None:
        self._driver = driver
        self.started: list[Sandbox] = []
        self.failing = False
        self.changed = asyncio.Event()

    @property
    def sandboxes(self) -> Collection[Sandbox]:
        return self._driver.sandboxes

    async def start(self, spec: SandboxSpec, *, snapshot: Snapshot | None = None) -> Sandbox:
        try:
            if self.failing:
                raise SandboxError("no more sandboxes today")
            self.started.append(await self._driver.start(spec, snapshot=snapshot))
        finally:
            self.changed.set()
        return self.started[-1]

    async def aclose(self) -> None:
        """The fixture of the driver closes it."""


async def closed(sandbox: Sandbox) -> None:
    """Return once the sandbox has been closed, which is seen by a tool server of our own in it."""
    if sandbox.alive:
        with await sandbox.spawn(ENTRY) as sock:
            await asyncio.get_running_loop().sock_recv(sock, 1)


@pytest.fixture
def driver(shared_driver: NamespaceDriver) -> CountingDriver:
    return CountingDriver(shared_driver)


@pytest.fixture
async def pool(driver: CountingDriver, run_dir: Path) -> AsyncIterator[WarmPool]:
    pool = WarmPool(driver, limit=3)
    yield pool
    await pool.aclose()


async def use(pool: WarmPool, spec: SandboxSpec = PLAIN, times: int = 1) -> None:
    """Take some at once, close them, and wait until the pool has drawn its conclusions."""
    places = await asyncio.gather(*(pool.take(spec) for _ in range(times)))
    for place in places:
        await place.aclose()
    await asyncio.wait_for(pool.settled(), 30)


async def test_the_second_time_one_stands_ready_for_the_third(pool: WarmPool, driver: CountingDriver) -> None:
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


async def test_each_is_handed_out_once(pool: WarmPool) -> None:
    await use(pool, times=4)
    assert pool.ready == 3
    places = await asyncio.gather(*(pool.take(PLAIN) for _ in range(6)))
    assert len({place.sandbox.id for place in places}) == 6
    for number, place in enumerate(places):
        await place.tools.write("/workspace/own", str(number).encode())
    for number, place in enumerate(places):
        assert await place.tools.read("/workspace/own") == str(number).encode()
        await place.aclose()


async def test_another_kind_is_not_handed_out(pool: WarmPool) -> None:
    await use(pool, PLAIN, times=2)
    assert pool.ready == 2
    place = await pool.take(OTHER)
    assert (await place.tools.bash("hostname", timeout_s=20)).text == "other\n"
    assert pool.ready == 2
    await place.aclose()
    with_python = await pool.take(PLAIN, python=True)
    assert (await with_python.tools.python("1 + 1", timeout_s=20)).text == "2\n"
    await with_python.aclose()


async def test_what_is_asked_for_now_takes_the_room_of_what_was_before(
    pool: WarmPool, driver: CountingDriver
) -> None:
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


async def test_one_that_died_is_not_handed_out(pool: WarmPool, driver: CountingDriver) -> None:
    await use(pool, times=2)
    assert pool.ready == 2
    for sandbox in driver.started:
        await sandbox.close()
    place = await pool.take(PLAIN)
    assert place.sandbox.alive
    assert (await place.tools.bash("echo here", timeout_s=20)).text == "here\n"
    await place.aclose()


async def test_unused_ones_do_not_stay_forever(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=3, memory_s=0.5)
    await use(pool, times=3)
    ended = [asyncio.create_task(closed(sandbox)) for sandbox in driver.started]
    assert len(ended) == 6
    await asyncio.wait_for(asyncio.gather(*ended), 30)
    assert pool.ready == 0
    await pool.aclose()


async def test_a_driver_that_fails_is_not_asked_again_and_again(
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


async def test_without_a_limit_nothing_stands_ready(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=0)
    await use(pool, times=3)
    assert len(driver.started) == 3
    assert pool.ready == 0
    await pool.aclose()


async def test_closing_while_one_starts_leaves_nothing(driver: CountingDriver, run_dir: Path) -> None:
    pool = WarmPool(driver, limit=3)
    await use(pool, times=3)
    await asyncio.sleep(0)
    await pool.aclose()
    await pool.aclose()
    assert not any(sandbox.alive for sandbox in driver.started)
    place = await pool.take(PLAIN)  # still served, by the driver
    await place.aclose()


async def test_a_workplace_that_cannot_be_equipped_leaves_no_sandbox(driver: CountingDriver) -> None:
    opening = asyncio.create_task(Workplace.open(driver, PLAIN, python=True))  # which waits to be told
    await driver.changed.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not driver.started[0].alive


async def test_one_that_is_expected_stands_ready_the_first_time(
    pool: WarmPool, driver: CountingDriver
) -> None:
    pool.expect(OTHER)
    await asyncio.wait_for(pool.settled(), 30)
    assert pool.ready == 1
    place = await pool.take(OTHER)
    assert (pool.hits, pool.ready, len(driver.started)) == (1, 0, 1)
    assert (await place.tools.bash("hostname", timeout_s=20)).text == "other\n"
    await place.aclose()
    await asyncio.wait_for(pool.settled(), 30)
    assert len(driver.started) == 1, "nobody expects another"


async def test_who_comes_early_waits_for_what_is_being_started(
    pool: WarmPool, driver: CountingDriver
) -> None:
    pool.expect(OTHER)
    while pool._filling is None:  # noqa: ASYNC110 - the loop must turn
        await asyncio.sleep(0)
    place = await pool.take(OTHER)
    assert (pool.hits, len(driver.started)) == (1, 1)
    await place.aclose()


async def test_what_is_expected_no_more_is_closed(pool: WarmPool, driver: CountingDriver) -> None:
    pool.expect(OTHER)
    await asyncio.wait_for(pool.settled(), 30)
    pool.expect_no_more(OTHER)
    await asyncio.wait_for(pool.settled(), 30)
    assert pool.ready == 0
    assert not driver.started[0].alive
    pool.expect_no_more(OTHER)  # nobody was
    pool.expect_no_more(PLAIN)


async def test_the_bound_holds_for_the_expected_and_the_first_comes_first(
    pool: WarmPool, driver: CountingDriver
) -> None:
    specs = [SandboxSpec(hostname=f"number{number}") for number in range(6)]
    for spec in specs:
        pool.expect(spec)
    await asyncio.wait_for(pool.settled(), 60)
    assert pool.ready == len(driver.started) == 3
    for number, spec in enumerate(specs):
        place = await pool.take(spec)
        assert (await place.tools.bash("hostname", timeout_s=20)).text == f"number{number}\n"
        await place.aclose()
        if number < 3:
            assert pool.hits == number + 1
        await asyncio.wait_for(pool.settled(), 60)
    assert pool.hits == 6 and len(driver.started) == 6


async def test_an_expected_one_that_does_not_start_stops_nobody(
    pool: WarmPool, driver: CountingDriver
) -> None:
    driver.failing = True
    pool.expect(OTHER)
    await asyncio.wait_for(pool.settled(), 30)
    assert pool.ready == 0
    driver.failing = False
    place = await pool.take(OTHER)
    await place.aclose()
