"""Measurement of the size of a hostile tree."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.sandbox.filesystem.disk_usage import DEPTH_LIMIT, DiskUse, walk

MANY = 1 << 60


@contextmanager
def descriptor(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def measured(path: Path, *, size: int = MANY, files: int = MANY) -> DiskUse:
    with descriptor(path) as fd:
        return walk(fd, size=size, files=files)


def test_the_sizes_of_all_files_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(os.urandom(1 << 20))
    use = measured(tmp_path)
    assert use.files == 3 and 1 << 20 <= use.size <= (1 << 20) + 65536


def test_hard_links_count_once_and_holes_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(1 << 20))
    for number in range(5):
        os.link(tmp_path / "file", tmp_path / f"name{number}")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert measured(tmp_path).size <= (1 << 20) + 65536


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to("/usr")
    assert measured(tmp_path / "tree").files == 1


def test_measuring_stops_at_the_limit(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes(4096))
    assert measured(tmp_path, files=10).files == 11
    assert 10_000 < measured(tmp_path, size=10_000).size < 30_000


def test_endless_nesting_is_too_deep(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(DEPTH_LIMIT + 50):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    assert measured(tmp_path, files=1000).too_deep


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    measured(tmp_path, files=1)
    measured(tmp_path)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
