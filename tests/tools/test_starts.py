"""Limit of concurrent starts: decisions as properties, the limiter, and real sandboxes."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.limits.memory_pressure import memory_is_short
from prorl_envs.tools.pool.start_limiter import SLOW_S, AdaptiveLimit, StartLimiter
from prorl_envs.tools.pool.warm_pool import WarmPool

pytestmark = pytest.mark.anyio


def machine(
    cores: int, asked: int, seconds: int, pace: AdaptiveLimit, one_s: float = 0.05
) -> tuple[int, list[int]]:
    """Simulate starts on a machine: each takes a constant time while cores are free, and more then (with
    thrashing: quadratically). Return the number of starts, and how many ran at once in each second."""
    now, done, running = 0.0, 0, []
    while now < seconds:
        wanted = asked
        while wanted > 1 and not pace.may_start(wanted - 1):
            wanted -= 1
        took = one_s * max(1.0, wanted / cores) ** 2
        now += took
        for _ in range(wanted):
            pace.took("kind", took, wanted, now)
        done += wanted
        running.append(wanted)
    return done, running


def test_a_fast_machine_is_never_slowed() -> None:
    pace = AdaptiveLimit()
    _, running = machine(cores=64, asked=32, seconds=60, pace=pace)
    assert running[:6] == [2, 4, 8, 16, 32, 32] and set(running[6:]) == {32}
    assert pace.slow == 0


def test_a_thrashing_machine_starts_fewer_at_once_and_more_in_total() -> None:
    slowed, running = machine(cores=2, asked=64, seconds=120, pace=(pace := AdaptiveLimit()))
    thrashing_per_s = 64 / (0.05 * 32**2)
    assert pace.slow > 0
    assert max(running[len(running) // 2 :]) < 16
    assert slowed / 120 > 3 * thrashing_per_s


def test_the_limit_recovers() -> None:
    pace = AdaptiveLimit()
    machine(cores=1, asked=64, seconds=30, pace=pace)
    assert pace.window.limit < 8
    _, running = machine(cores=64, asked=32, seconds=120, pace=pace)
    assert running[-1] == 32


def test_a_kind_that_always_takes_long_is_not_slow() -> None:
    """A large image beside a small one: each is compared with its own best time."""
    pace = AdaptiveLimit()
    for number in range(200):
        pace.took("small", 0.02, 8, float(number))
        pace.took("large", 4.0, 8, float(number))
    assert pace.slow == 0


def test_a_slow_start_that_ran_alone_does_not_lower_the_limit() -> None:
    pace = AdaptiveLimit()
    pace.took("kind", 0.01, 1, 0.0)
    pace.took("kind", 9.0, 1, 2.0)
    assert pace.slow == 0 and pace.may_start(1)


def test_short_memory_lowers_the_limit() -> None:
    pace = AdaptiveLimit()
    for second in range(20):
        pace.memory_is_short(16, float(second))
    assert pace.short == 20 and not pace.may_start(1) and pace.may_start(0)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["took", "short"]),
        st.sampled_from("abc"),
        st.floats(0, 1e4),
        st.integers(1, 100),
        st.floats(0, 10),
    ),
    max_size=60,
)


@given(EVENTS)
def test_one_start_is_always_allowed(events: list[tuple[str, str, float, int, float]]) -> None:
    pace, now = AdaptiveLimit(), 0.0
    for what, kind, seconds, running, later in events:
        now += later
        before = pace.window.limit
        if what == "took":
            pace.took(kind, seconds, running, now)
            if seconds <= SLOW_S:
                assert pace.window.limit >= before, "what is quick never slows"
        else:
            pace.memory_is_short(running, now)
            assert pace.window.limit <= before
        assert pace.may_start(0)
        assert pace.window.limit >= 1


@given(st.lists(st.sampled_from(["enter", "leave", "cancel", "fail", "short"]), max_size=60))
async def test_every_waiter_gets_its_turn(events: list[str]) -> None:
    """In any order of events: a waiter waits only for a reason, and each gets a turn or has left."""
    starts = StartLimiter(lambda: False)
    inside: dict[asyncio.Task[None], asyncio.Future[None]] = {}
    tasks: list[asyncio.Task[None]] = []

    async def one() -> None:
        async with starts.turn("kind"):
            me = asyncio.current_task()
            assert me is not None
            inside[me] = asyncio.get_running_loop().create_future()
            try:
                await inside[me]
            finally:
                del inside[me]

    for number, event in enumerate(events):
        match event:
            case "enter":
                tasks.append(asyncio.create_task(one()))
            case "leave" | "fail" if undecided := [end for end in inside.values() if not end.done()]:
                if event == "leave":
                    undecided[0].set_result(None)
                else:
                    undecided[-1].set_exception(OSError())
            case "cancel" if tasks:
                tasks[number % len(tasks)].cancel()
            case "short":
                starts.pace.memory_is_short(starts.running, float(number))
        if number % 3:
            for _ in range(3):
                await asyncio.sleep(0)
            assert starts.running == len(inside)
            assert starts.running == 0 or not starts.waiting or not starts.pace.may_start(starts.running)
            assert starts.running > 0 or not starts.waiting
    while not all(task.done() for task in tasks):
        for future in list(inside.values()):
            if not future.done():
                future.set_result(None)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (starts.running, starts.waiting) == (0, 0)


async def test_real_sandboxes_start_one_by_one_while_memory_is_short(shared_driver: BubblewrapDriver) -> None:
    starts = StartLimiter(lambda: True)
    starts.pace.memory_is_short(1, -10.0)
    pool = WarmPool(shared_driver, limit=0, starts=starts)
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, starts.running)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    places = await asyncio.gather(*(pool.take(SandboxSpec()) for _ in range(6)))
    looking.cancel()
    assert most <= 2, "a start that went well lets one more in"
    assert [(await place.tools.bash("echo hi", timeout_s=60)).text for place in places] == ["hi\n"] * 6
    for place in places:
        await place.aclose()
    await pool.aclose()


def kernel(
    tmp_path: Path,
    *,
    available: int = 50,
    waited: float = 0.0,
    most: str = "max",
    used: int = 0,
    idle: int = 0,
) -> tuple[Path, Path]:
    """Write files like the kernel's: of a machine with 100 kB, and of a group below a bounded one."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    group = groups / "job" / "step"
    for folder in (proc / "self", proc / "pressure", group):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 100 kB\nMemAvailable: {available} kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (proc / "pressure" / "memory").write_text(f"some avg10={waited} avg60=0.00 total=1\nfull avg10=99.0\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text(f"{most}\n")
    (group.parent / "memory.current").write_text(f"{used}\n")
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {idle}\n")
    return proc, groups


def test_short_memory_is_detected(tmp_path: Path) -> None:
    assert not memory_is_short(*kernel(tmp_path / "1"))
    assert memory_is_short(*kernel(tmp_path / "2", available=4))
    assert memory_is_short(*kernel(tmp_path / "3", waited=10.5))
    assert memory_is_short(*kernel(tmp_path / "4", most="100", used=96))
    assert not memory_is_short(*kernel(tmp_path / "5", most="100", used=96, idle=50))
    assert not memory_is_short(tmp_path / "nothing", tmp_path / "nothing")
