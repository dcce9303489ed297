"""Lock between nodes: detection of dead owners, and processes that compete for a key."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prorl_envs.images.lock import KeyLock, LockPlace, Owner, abandoned, here, process_started, read_lock
from tests.images.conftest import names

pytestmark = pytest.mark.anyio

HERE = LockPlace("host", "boot", "pids")
OWNER = Owner(HERE, 7, "100", "token")


@pytest.mark.parametrize(
    ("owner", "started", "unchanged_s", "gone"),
    [
        (OWNER, "100", 0.0, False),
        (OWNER, "100", 1e9, False),  # alive here, though silent: it is only stopped
        (OWNER, "", 0.0, True),  # dead
        (OWNER, "200", 0.0, True),  # its number was reused by another process
        (Owner(LockPlace("other", "boot", "pids"), 7, "100", "t"), "100", 9.0, False),
        (Owner(LockPlace("other", "boot", "pids"), 7, "100", "t"), "100", 10.0, True),
        (Owner(LockPlace("host", "earlier", "pids"), 7, "100", "t"), "100", 9.0, False),
        (Owner(LockPlace("host", "boot", "container"), 7, "100", "t"), "", 9.0, False),
        (None, "", 9.0, False),
        (None, "", 10.0, True),
    ],
)
def test_dead_owners_are_detected(owner: Owner | None, started: str, unchanged_s: float, gone: bool) -> None:
    assert abandoned(owner, HERE, lambda pid: started, unchanged_s, 10.0) is gone


def test_the_start_time_of_a_process_is_read() -> None:
    assert process_started(os.getpid()) == process_started(os.getpid()) != ""
    assert process_started(2**22 + 1) == ""


async def test_the_lock_is_held_and_released(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    async with KeyLock(path):
        found = read_lock(path)
        assert found is not None and found[0] is not None
        assert (found[0].place, found[0].pid) == (here(), os.getpid())
    assert names(tmp_path) == []


async def test_owners_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []
    waited: list[Owner | None] = []

    async def one(number: int) -> None:
        async with KeyLock(tmp_path / "key.lock", on_wait=waited.append):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.to_thread(os.sched_yield)
            inside.remove(number)

    await asyncio.gather(*map(one, range(4)))
    assert waited
    assert names(tmp_path) == []


async def test_a_cancelled_waiter_and_a_cancelled_owner_leave_no_file(tmp_path: Path) -> None:
    waiting = asyncio.Event()
    async with KeyLock(tmp_path / "key.lock"):
        waiter = asyncio.create_task(
            KeyLock(tmp_path / "key.lock", on_wait=lambda owner: waiting.set()).__aenter__()
        )
        await waiting.wait()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert names(tmp_path) == ["key.lock"]
    taker = asyncio.create_task(KeyLock(tmp_path / "key.lock").__aenter__())
    await asyncio.sleep(0)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    assert names(tmp_path) == []


HOLD = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.images.lock import KeyLock

async def main():
    async with KeyLock(Path(sys.argv[1])):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def held_elsewhere(path: Path) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_a_killed_owners_lock_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    with held_elsewhere(path) as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"held\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert path.exists()
    async with KeyLock(path, stale_s=1e9):
        pass
    assert names(tmp_path) == []


async def test_the_lock_of_a_silent_remote_owner_and_a_damaged_lock_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    elsewhere = Owner(LockPlace("other", "boot", "pids"), 1, "1", "token")
    for content in (msgspec.json.encode(elsewhere), b"damaged", b""):
        path.write_bytes(content)
        async with KeyLock(path, stale_s=0.0):
            pass
        assert names(tmp_path) == []


async def test_a_replaced_owner_removes_no_other_lock(tmp_path: Path) -> None:
    path = tmp_path / "key.lock"
    other = msgspec.json.encode(Owner(LockPlace("other", "boot", "pids"), 1, "1", "token"))
    async with KeyLock(path):
        path.unlink()
        path.write_bytes(other)
    assert path.read_bytes() == other
    assert names(tmp_path) == ["key.lock"]


async def test_without_hard_links_one_process_creates_the_file(tmp_path: Path) -> None:
    first, second = KeyLock(tmp_path / "key.lock"), KeyLock(tmp_path / "key.lock")
    assert first._create()
    assert not second._create()
    await first.__aexit__(None, None, None)
    assert second._create()
    await second.__aexit__(None, None, None)
    assert names(tmp_path) == []
