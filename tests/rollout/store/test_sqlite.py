"""Further promises of the SQLite store, about its file and full disks."""

import asyncio
import os
import resource
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import NotFound, Unavailable
from prorl_envs.rollout.store.sqlite import SqliteStore, mount_of
from tests.rollout.store.test_store import group, result
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(path: Path, **bounds: int) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, **bounds)
    try:
        yield store
    finally:
        await store.aclose()


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """Limit files of this process to the current size of the store's journal, so that writes really fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name(path.name + "-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_file_has_one_service(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    (tmp_path / "link.db").symlink_to(path)
    async with opened(path):
        for other in (path, tmp_path / "link.db"):
            with pytest.raises(InputError, match="open in another service"):
                SqliteStore(other)
    async with opened(path) as store:
        assert await store.unfinished() == []
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_file_of_another_program_is_not_changed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    other = tmp_path / "other.db"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE x (y)")
    db.close()
    before = other.read_bytes()
    for path in (text, other, tmp_path, tmp_path / "none" / "store.db"):
        with pytest.raises(InputError):
            SqliteStore(path)
    assert other.read_bytes() == before
    assert text.read_text() == "no database " * 100


@pytest.mark.parametrize("version", [1, 6, 99])
async def test_a_store_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "store.db"
    async with opened(path):
        pass
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(InputError, match=f"format {version}"):
        SqliteStore(path)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_result_whose_acknowledgement_a_crash_lost_is_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The files are copied in the state that a killed process leaves."""
    monkeypatch.setattr("prorl_envs.rollout.store.sqlite._shared", lambda folder: shared)

    def crash(name: str) -> Path:
        (tmp_path / name).mkdir()
        for path in [tmp_path / "store.db", tmp_path / "store.db-wal"]:
            shutil.copy(path, tmp_path / name / path.name)
        return tmp_path / name / "store.db"

    async with opened(tmp_path / "store.db") as store:
        await store.submit([group(samples=3)])
        for sample in range(2):
            await store.record(result(sample=sample))
        store.acknowledge([1])
        before = crash("before")  # the write waits for others
        await store.put_value("written", "")
        after = crash("after")
    for path, unread, kept in ((before, 2, [1, 2, 3]), (after, 1, [2, 3])):
        async with opened(path, max_results=1) as store:
            assert store.unread.results == unread
            await store.record(result(sample=2))
            assert [r.cursor for r in await store.results(0, 10)] == kept


async def test_a_full_disk_refuses_writes_and_keeps_accepted_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.submit([group("a")])
        kept = await store.record(result("a"))
        with full_disk(path):
            with pytest.raises(Unavailable, match="cannot be written"):
                await store.submit([group("b")])
            with pytest.raises(Unavailable, match="cannot be written"):
                await store.record(result("a", 1))
            assert await store.results(0, 10) == [kept]
            with pytest.raises(NotFound):
                await store.group("b")
            with pytest.raises(Unavailable, match="the store cannot be written"):
                store.check_writable()
        assert await store.submit([group("b")]) == [True]
        assert (await store.record(result("a", 1))).cursor == kept.cursor + 1
        store.check_writable()
    failed, again = [record.message for record in caplog.records]
    assert failed.startswith("store.db cannot be written: ") and again == "store.db can be written again"


async def test_work_that_fails_rolls_back_its_transaction(tmp_path: Path) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("out of luck")

    async with opened(tmp_path / "store.db") as store:
        await store.submit([group()])
        await store.record(result())
        both = await asyncio.gather(
            store.record(result(sample=1)), store._write(fail), return_exceptions=True
        )
        assert all(isinstance(error, Unavailable) and "out of luck" in str(error) for error in both)
        assert [found.sample for found in await store.results(0, 10)] == [0]
        assert (await store.record(result(sample=1))).cursor == 2


async def test_another_writing_program_does_not_block_for_long(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.submit([group()])
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(Unavailable, match="locked"):
            await store.record(result())
        assert time.monotonic() - began < 3
        other.execute("ROLLBACK")
        other.close()
        assert (await store.record(result())).cursor == 1


async def test_recent_results_are_read_from_memory_and_older_ones_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_envs.rollout.store.base.RECENT_RESULTS", 3)
    async with opened(tmp_path / "store.db") as store:
        await store.submit([group(samples=5)])
        made = [await store.record(result(sample=sample, tokens=2)) for sample in range(5)]
        followed, read = await store.results(2, 10), await store.results(1, 10)
        assert [one is other for one, other in zip(followed, made[2:], strict=True)] == [True] * 3
        assert read[1:] == followed
        assert read[1] is not followed[0]
        assert await store.results(5, 10) == []
        assert await store.newest() == 5
        monkeypatch.setattr("prorl_envs.rollout.store.base.RECENT_TOKENS", 5)
        await store.submit([group("h")])
        last = await store.record(result("h", tokens=2))
        assert (await store.results(4, 10))[1] is last
        assert (await store.results(3, 10))[2] is not last, "two tokens each, and five are kept"


# With a service.


async def test_a_service_on_a_full_disk_halts_and_later_continues(make_bench: Any, tmp_path: Path) -> None:
    path, clock = tmp_path / "store.db", FakeClock()
    async with opened(path) as store:
        bench = await make_bench(kept_in=store, clock=clock)
        bench.world.gates["eval"] = asyncio.Event()
        await bench.submit(bench.group())
        await bench.world.until(lambda: bench.world.inside["eval"] == 1)
        with full_disk(path):
            bench.world.gates["eval"].set()
            while 1.0 not in clock.sleeping:  # noqa: ASYNC110 - until the write has failed and waits
                await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await bench.submit(bench.group("refused"))
            assert bench.world.open == 1, "the job holds its place"
        clock.advance(1)
        [kept] = await bench.finished(1)
        assert (kept.job_id, kept.reward, kept.attempts) == ("g/0", 1.0, 1)
        await bench.service.stop()


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
31 22 0:45 / /home rw,relatime shared:9 - nfs4 filer:/home rw,vers=4.2,local_lock=none
32 22 0:46 / /scratch\\040fast rw - fuse.sshfs other:/ rw
33 22 0:47 / /lustre rw - lustre mgs:/fs rw,localflock
"""


@pytest.mark.parametrize(
    ("major", "minor", "kind", "option"),
    [(254, 1, "ext4", "rw"), (0, 45, "nfs4", "vers=4.2"), (0, 46, "fuse.sshfs", "rw"), (0, 48, "", None)],
)
def test_the_file_system_is_detected(major: int, minor: int, kind: str, option: str | None) -> None:
    found, options = mount_of(os.makedev(major, minor), MOUNTS)
    assert found == kind and (option in options if option else not options)


async def test_a_store_whose_lock_holds_on_one_machine_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev  # noqa: ASYNC240 - a local directory
    here = f"{os.major(device)}:{os.minor(device)}"
    for place, refused in (("0:47", "lustre.*localflock"), ("0:46", "sshfs"), ("0:45", "")):
        mount = MOUNTS.replace(place, here)
        monkeypatch.setattr(Path, "read_text", lambda path, mount=mount, **_: mount)
        if refused:
            with pytest.raises(InputError, match=f"on {refused}"):
                SqliteStore(tmp_path / "store.db")
            assert not (tmp_path / "store.db").exists()
        else:
            async with opened(tmp_path / "store.db") as store:
                await store.submit([group()])
                assert not (tmp_path / "store.db-shm").exists()


def test_the_file_system_here_is_local(tmp_path: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    assert mount_of(tmp_path.stat().st_dev, mounts)[0] not in ("", "nfs", "nfs4", "lustre")
