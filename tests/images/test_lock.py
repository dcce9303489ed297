"""Lock of a key: tasks and processes that compete for it, and killed owners."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.images.lock import key_lock
from tests.images.conftest import names

pytestmark = pytest.mark.anyio


async def test_owners_take_turns(tmp_path: Path) -> None:
    inside: list[int] = []
    waited: list[int] = []

    async def one(number: int) -> None:
        async with key_lock(tmp_path / "key.lock", on_wait=lambda: waited.append(number)):
            inside.append(number)
            assert len(inside) == 1
            await asyncio.to_thread(os.sched_yield)
            inside.remove(number)

    await asyncio.gather(*map(one, range(4)))
    assert waited
    assert names(tmp_path) == []


async def acquired_and_released(path: Path, waiting: asyncio.Event) -> None:
    async with key_lock(path, on_wait=waiting.set):
        pass


async def test_a_cancelled_waiter_and_a_cancelled_owner_leave_no_file(tmp_path: Path) -> None:
    path, waiting = tmp_path / "key.lock", asyncio.Event()
    async with key_lock(path):
        waiter = asyncio.create_task(acquired_and_released(path, waiting))
        await waiting.wait()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert names(tmp_path) == ["key.lock"]
    taker = asyncio.create_task(acquired_and_released(path, waiting))
    await asyncio.sleep(0)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    assert names(tmp_path) == []
    async with key_lock(path):
        pass


HOLD = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.images.lock import key_lock

async def main():
    async with key_lock(Path(sys.argv[1])):
        print("held", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def held_elsewhere(path: Path) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_the_lock_of_another_process_is_taken_over_when_that_is_killed(tmp_path: Path) -> None:
    path, waiting = tmp_path / "key.lock", asyncio.Event()
    with held_elsewhere(path) as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"held\n"
        waiter = asyncio.create_task(acquired_and_released(path, waiting))
        await waiting.wait()
        owner.send_signal(signal.SIGKILL)
        await asyncio.to_thread(owner.wait)
    await waiter
    assert names(tmp_path) == []
