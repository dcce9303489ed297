"""Copies of hostile trees of a sandbox."""

import contextlib
import os
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.disk_usage import DEPTH_LIMIT
from prorl_envs.sandbox.filesystem.tree_copy import CopyStopped, copy_tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    path.mkdir()
    return path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return tmp_path / "copy"


def run(tree: Path, copy: Path) -> None:
    copy_tree(tree, copy, threading.Event())


def test_contents_modes_and_times_are_kept(tree: Path, copy: Path) -> None:
    (tree / "folder").mkdir()
    (tree / "folder" / "file").write_bytes(b"content" * 10_000)
    (tree / "folder" / "file").chmod(0o4755)
    os.utime(tree / "folder" / "file", ns=(1_000_000_001, 2_000_000_002))
    (tree / "folder").chmod(0o1777)
    os.utime(tree / "folder", ns=(3, 4_000_000_005))
    run(tree, copy)
    file = copy / "folder" / "file"
    assert file.read_bytes() == b"content" * 10_000
    assert stat.S_IMODE(file.stat().st_mode) == 0o4755
    assert file.stat().st_mtime_ns == 2_000_000_002
    assert stat.S_IMODE((copy / "folder").stat().st_mode) == 0o1777
    assert (copy / "folder").stat().st_mtime_ns == 4_000_000_005


def test_a_tree_is_copied_to_another_file_system(tree: Path) -> None:
    with (tree / "file").open("wb") as file:
        file.write(b"start")
        file.seek(8 << 20)
        file.write(b"end" * 100_000)
    os.setxattr(tree / "file", "user.name", b"value")
    (tree / "file").chmod(0o640)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        copy = Path(other) / "copy"
        assert Path(other).stat().st_dev != tree.stat().st_dev
        run(tree, copy)
        assert (copy / "file").read_bytes() == (tree / "file").read_bytes()
        assert (copy / "file").stat().st_blocks < 8 << 11
        assert os.getxattr(copy / "file", "user.name") == b"value"
        assert stat.S_IMODE((copy / "file").stat().st_mode) == 0o640


def test_links_are_copied_and_not_followed(tree: Path, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tree / "to_folder").symlink_to(tmp_path / "outside")
    (tree / "to_file").symlink_to(tmp_path / "outside" / "secret")
    (tree / "circle").symlink_to("circle")
    run(tree, copy)
    assert (copy / "to_folder").readlink() == tmp_path / "outside"
    assert all((copy / name).is_symlink() for name in ("to_folder", "to_file", "circle"))


def test_hard_links_stay_one_file(tree: Path, copy: Path) -> None:
    (tree / "a").mkdir()
    (tree / "a" / "one").write_text("x")
    (tree / "two").hardlink_to(tree / "a" / "one")
    (tree / "link").symlink_to("nowhere")
    os.link(tree / "link", tree / "second_link", follow_symlinks=False)
    run(tree, copy)
    assert (copy / "two").samefile(copy / "a" / "one")
    assert (copy / "second_link").is_symlink()
    assert (copy / "second_link").lstat().st_ino == (copy / "link").lstat().st_ino


def test_unreadable_directories_are_copied_and_stay_unreadable(tree: Path, copy: Path) -> None:
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner" / "file").write_text("x")
    (tree / "closed" / "inner" / "file").chmod(0)
    (tree / "closed" / "inner").chmod(0o300)
    (tree / "closed").chmod(0)
    run(tree, copy)
    for place in (tree, copy):
        assert stat.S_IMODE((place / "closed").stat().st_mode) == 0
        (place / "closed").chmod(0o700)
        assert stat.S_IMODE((place / "closed" / "inner").stat().st_mode) == 0o300
        (place / "closed" / "inner").chmod(0o700)
        assert stat.S_IMODE((place / "closed" / "inner" / "file").stat().st_mode) == 0
        (place / "closed" / "inner" / "file").chmod(0o600)
    assert (copy / "closed" / "inner" / "file").read_text() == "x"


def test_holes_stay_holes(tree: Path, copy: Path) -> None:
    with (tree / "sparse").open("wb") as file:
        file.seek(1 << 40)
        file.write(b"end")
        file.truncate((1 << 40) + (1 << 30))
    run(tree, copy)
    status = (copy / "sparse").stat()
    assert status.st_size == (1 << 40) + (1 << 30)
    assert status.st_blocks * 512 < 1 << 20
    with (copy / "sparse").open("rb") as file:
        file.seek(1 << 40)
        assert file.read(3) == b"end"


def test_special_files_are_not_opened(tree: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)  # a socket's path must be short
    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        os.mknod(tree / "deleted", stat.S_IFCHR, os.makedev(0, 0))
        run(tree, copy)
    assert stat.S_ISFIFO((copy / "pipe").stat().st_mode)
    assert stat.S_ISSOCK((copy / "socket").stat().st_mode)
    deleted = (copy / "deleted").stat()
    assert stat.S_ISCHR(deleted.st_mode)
    assert deleted.st_rdev == 0


def test_the_overlays_attributes_are_kept(tree: Path, copy: Path) -> None:
    (tree / "folder").mkdir()
    os.setxattr(tree / "folder", "user.overlay.opaque", b"y")
    run(tree, copy)
    assert os.getxattr(copy / "folder", "user.overlay.opaque") == b"y"


def test_names_that_are_not_unicode_are_copied(tree: Path, copy: Path) -> None:
    name = os.fsdecode(b"\xff\xfe\n")
    (tree / name).write_text("x")
    run(tree, copy)
    assert (copy / name).read_text() == "x"


def test_a_tree_too_deep_is_refused(tree: Path, copy: Path) -> None:
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(DEPTH_LIMIT + 2):
        os.mkdir("d" * 10, dir_fd=fd)
        inner = os.open("d" * 10, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    with pytest.raises(SandboxError, match=f"more than {DEPTH_LIMIT} deep"):
        run(tree, copy)
    remove_tree(tree)
    remove_tree(copy)


def test_a_copy_stops_on_request(tree: Path, copy: Path) -> None:
    (tree / "file").touch()
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyStopped):
        copy_tree(tree, copy, stop)
    assert not (copy / "file").exists()


def test_a_tree_that_changes_during_the_copy(tree: Path, copy: Path, tmp_path: Path) -> None:
    """A link repeatedly replaces a directory; no file outside the tree is ever copied."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tree / "folder").mkdir()
    (tree / "link").symlink_to(tmp_path / "outside")
    ended = threading.Event()

    def exchange() -> None:
        while not ended.is_set():
            (tree / "folder").rename(tree / "kept")
            (tree / "link").rename(tree / "folder")
            (tree / "folder").rename(tree / "link")
            (tree / "kept").rename(tree / "folder")

    changing = threading.Thread(target=exchange)
    changing.start()
    try:
        for count in range(40):
            target = copy.with_name(f"copy{count}")
            with contextlib.suppress(OSError):  # it changed a moment ago
                run(tree, target)
            assert not any("secret" in names for _, _, names in os.walk(target))
    finally:
        ended.set()
        changing.join()
