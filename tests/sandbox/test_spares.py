"""Directories reused from a closed sandbox: empty and as if new, or not reused at all."""

import fcntl
import os
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import Mount, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem import directory_pool
from prorl_envs.sandbox.filesystem.directory_pool import DirectoryPool
from prorl_envs.testing.sandbox_entry import run_script

GET_FLAGS, SET_FLAGS, NO_DUMP = 0x80086601, 0x40086602, 0x40
NAMES = ("work", "tmp", "home")


class Place:
    """Base directory in which sandboxes' directories are made and retired."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.spares = DirectoryPool(base)
        self._count = 0

    def make(self) -> Path:
        self._count += 1
        root = self.base / str(self._count)
        self.spares.make(root, [root / name for name in NAMES])
        return root

    def waiting(self) -> list[str]:
        return [path.name for path in self.base.glob("spare*")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def flags(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        (found,) = struct.unpack("q", fcntl.ioctl(fd, GET_FLAGS, bytes(8)))
    except OSError:
        return 0
    finally:
        os.close(fd)
    return int(found)


def seen(root: Path) -> Sequence[object]:
    """Return every observable property of the directories except times and numbers."""
    return [
        (
            path.name,
            stat.filemode(path.stat().st_mode),
            sorted(child.name for child in path.iterdir()),
            os.listxattr(path),
            flags(path),
            path.stat().st_size <= 4096,
        )
        for path in (root, *sorted(root.iterdir()))
    ][1:]


def inodes(root: Path) -> list[int]:
    return [path.stat().st_ino for path in (root, *sorted(root.iterdir()))]


def test_an_empty_sandboxs_directories_are_reused(place: Place) -> None:
    first = place.make()
    fresh, numbers = seen(first), inodes(first)
    place.spares.retire(first, NAMES)
    assert not first.exists()
    second = place.make()
    assert seen(second) == fresh
    assert inodes(second) == numbers
    assert place.waiting() == []


def files(path: Path) -> None:
    (path / "deep" / "er").mkdir(parents=True)
    (path / "deep" / "file").write_text("left")
    (path / "link").symlink_to("/")
    (path / "deep").chmod(0)


def mode(path: Path) -> None:
    path.chmod(0o7777)


def attribute(path: Path) -> None:
    try:
        os.setxattr(path, "user.given", b"on")
    except OSError:
        pytest.skip("this file system has no attributes")


def flag(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SET_FLAGS, struct.pack("q", flags(path) | NO_DUMP))
    except OSError:
        pytest.skip("this file system has no flags")
    finally:
        os.close(fd)


def growth(path: Path) -> None:
    for number in range(300):
        (path / f"{number:0200}").touch()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("give", [files, mode, attribute, flag, growth])
def test_changes_of_a_sandbox_are_not_found(place: Place, give: Callable[[Path], None], name: str) -> None:
    fresh = seen(first := place.make())
    give(first / name)
    place.spares.retire(first, NAMES)
    assert seen(place.make()) == fresh


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("give", [None, files, mode, attribute, flag, growth])
def test_recycled_directories_are_as_if_new_and_others_are_unchanged(
    place: Place, give: Callable[[Path], None] | None, name: str
) -> None:
    fresh, numbers = seen(first := place.make()), inodes(first)
    if give is not None:
        give(first / name)
    given = seen(first)
    taken = place.spares.take_back(first, NAMES)
    assert taken == (give in (None, mode))
    if taken:
        assert seen(second := place.make()) == fresh
        assert inodes(second) == numbers
    else:
        assert seen(first) == given
        place.spares.retire(first, NAMES)
        assert seen(place.make()) == fresh


@pytest.mark.parametrize("what", ["hostname", "work"])
def test_a_directory_with_foreign_content_is_not_recycled(place: Place, what: str) -> None:
    first = place.make()
    (first / what).touch(exist_ok=True)
    assert not place.spares.take_back(first, ("tmp", "home"))
    assert first.exists()
    assert place.waiting() == []


def test_a_grown_directory_is_not_kept_without_flags(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_pool, "_GET_FLAGS", 0)
    monkeypatch.setattr(directory_pool, "_GET_EXTENDED", 0)
    fresh = seen(first := place.make())
    growth(first / "tmp")
    place.spares.retire(first, NAMES)
    assert seen(place.make()) == fresh


def test_changed_times_are_not_found(place: Place) -> None:
    first = place.make()
    os.utime(first / "home", (1, 1))
    place.spares.retire(first, NAMES)
    assert (place.make() / "home").stat().st_mtime > 1


def test_unlisted_directories_are_removed(place: Place) -> None:
    first = place.make()
    work, home = (first / "work").stat().st_ino, (first / "home").stat().st_ino
    handle = os.open(first / "work", os.O_RDONLY)
    try:
        (first / "hostname").touch()
        (first / "upper").mkdir()
        place.spares.retire(first, ("tmp", "home"))
        second = place.make()
        assert sorted(path.name for path in second.iterdir()) == sorted(NAMES)
        assert (second / "home").stat().st_ino == home
        assert (second / "work").stat().st_ino != work  # `handle` keeps its number in use
    finally:
        os.close(handle)


def test_no_more_are_kept_than_the_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_pool, "_LIMIT", 2)
    *roots, last = [place.make() for _ in range(4)]
    for root in roots:
        place.spares.retire(root, NAMES)
    assert not place.spares.take_back(last, NAMES)
    place.spares.retire(last, NAMES)
    assert len(place.waiting()) == len(list(place.base.iterdir())) == 2


def test_a_missing_directory_is_not_retired(place: Place) -> None:
    assert not place.spares.take_back(place.base / "absent", NAMES)
    place.spares.retire(place.base / "absent", NAMES)
    assert place.waiting() == []


@pytest.mark.parametrize("what", ["", "home"])
def test_spares_removed_by_another_process_are_replaced(place: Place, what: str) -> None:
    fresh = seen(first := place.make())
    place.spares.retire(first, NAMES)
    (spare,) = place.waiting()
    for name in (what,) if what else NAMES:
        (place.base / spare / name).rmdir()
    if not what:
        (place.base / spare).rmdir()
    assert seen(place.make()) == fresh


@pytest.mark.anyio
async def test_sandboxes_reuse_directories(own_driver: BubblewrapDriver) -> None:
    async def numbers() -> str:
        sandbox = await own_driver.start(SandboxSpec())
        try:
            said = await run_script(
                sandbox, "stat -c %i ~ /tmp .; touch ~/f /tmp/f f; ls -A ~ /tmp . | wc -l"
            )
        finally:
            await sandbox.close()
        return said

    assert await numbers() == await numbers()


@pytest.mark.anyio
async def test_a_workspace_mounted_elsewhere_is_not_reused(own_driver: BubblewrapDriver) -> None:
    async def start(*mounts: Mount) -> Sandbox:
        return await own_driver.start(SandboxSpec(mounts=mounts))

    shown = await start()
    grading = await start(Mount(source=shown.workspace, target="/submission"))
    await run_script(shown, "touch solution")
    assert await run_script(grading, "ls /submission") == "solution\n"
    await shown.close()
    other = await start()
    await run_script(other, "touch secret")
    assert await run_script(grading, "ls /submission") == ""
