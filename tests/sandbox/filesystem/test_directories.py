"""Driver directories, and the removal of abandoned directories and of hostile trees."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from prorl_envs.errors import UnsupportedMachine
from prorl_envs.sandbox.filesystem.directories import (
    PATH_LIMIT,
    DriverDirectory,
    node_local_base,
    remove_tree,
    sweep,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Directory that must survive every removal beside it."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "kept").write_text("kept")
    return path


def test_links_are_removed_and_not_followed(tmp_path: Path, outside: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "link").symlink_to(outside)
    (tree / "inner" / "link").symlink_to(outside / "kept")
    (tree / "inner" / "loop").symlink_to(tree)
    remove_tree(tree)
    assert not tree.exists()
    assert (outside / "kept").read_text() == "kept"


def test_a_link_in_place_of_the_tree_is_refused(tmp_path: Path, outside: Path) -> None:
    tree = tmp_path / "tree"
    tree.symlink_to(outside)
    with pytest.raises(OSError, match="tree"):
        remove_tree(tree)
    assert (outside / "kept").exists()


def test_a_tree_deeper_than_any_path_and_than_the_stack_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("nested", dir_fd=fd)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        inner = os.open("nested", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    remove_tree(tree)
    assert not tree.exists()


def test_unreadable_directories_and_special_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    locked = tree / "a" / "locked"
    (locked / "inside" / "deep").mkdir(parents=True)
    os.mkfifo(tree / "fifo")
    monkeypatch.chdir(tree)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    (tree / b"not utf-8 \xff".decode(errors="surrogateescape")).touch()
    (tree / "new\nline").mkdir()
    locked.chmod(0)
    (tree / "a").chmod(0o500)
    remove_tree(tree)
    assert not tree.exists()


def test_many_files_are_removed_without_a_list_of_them(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(20_000):
        (tree / str(number)).touch()
    tracemalloc.start()
    remove_tree(tree)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not tree.exists()
    assert peak < 1 << 20


def test_removing_a_missing_tree_succeeds(tmp_path: Path) -> None:
    remove_tree(tmp_path / "absent")


def test_a_driver_directory_is_private_and_removed_on_close(run_dir: Path) -> None:
    directory = DriverDirectory(run_dir)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.path not in sweep(run_dir)  # it is in use
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_a_directory_of_a_driver_killed_before_it_was_locked_is_removed_after_a_minute(run_dir: Path) -> None:
    abandoned = DriverDirectory(run_dir)
    os.close(abandoned._lock)
    (abandoned.path / "locked").unlink()
    assert abandoned.path not in sweep(run_dir), "another driver may be about to lock it"
    os.utime(abandoned.path, (0, 0))
    assert abandoned.path in sweep(run_dir)


def test_only_abandoned_directories_of_this_user_are_removed(tmp_path: Path, outside: Path) -> None:
    abandoned = tmp_path / f"prorl-sandboxes-{os.geteuid()}-abandoned"
    abandoned.mkdir()
    (abandoned / "locked").touch()
    unfinished = tmp_path / f"prorl-sandboxes-{os.geteuid()}-unfinished"
    unfinished.mkdir()
    link = tmp_path / f"prorl-sandboxes-{os.geteuid()}-link"
    link.symlink_to(outside)
    assert sweep(tmp_path) == [abandoned]
    assert unfinished.exists()
    assert (outside / "kept").exists()


@pytest.mark.parametrize("name", ["absent", "x" * PATH_LIMIT])
def test_an_unusable_base_is_named_with_a_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedMachine, match=name) as caught:
        DriverDirectory(tmp_path / name)
    assert "PRORL_RUN_DIR" in caught.value.hint


def test_a_base_where_no_program_could_run_is_refused(run_dir: Path) -> None:
    """Otherwise a correct script of an agent would fail."""
    base = run_dir / "noexec"
    base.mkdir()
    script = f'mount -t tmpfs -o noexec none {base} && exec "$0" -c "$1"'
    program = (
        "from pathlib import Path\n"
        "from prorl_envs.errors import SandboxError\n"
        "from prorl_envs.sandbox.filesystem.directories import DriverDirectory\n"
        f"try:\n    DriverDirectory(Path({str(base)!r}))\n"
        "except SandboxError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        ["unshare", "-U", "-r", "-m", "sh", "-c", script, sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    base.rmdir()
    assert f"{base} is mounted noexec" in done.stdout and "PRORL_RUN_DIR" in done.stdout, done.stderr


#: Starts a sandbox on a full disk, and again once there is room.
FULL = """\
import asyncio, subprocess, sys
from pathlib import Path
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver

async def main():
    base, name = sys.argv[1:]
    try:
        driver = make_driver(name, Path(base))
    except SandboxError as error:
        return print(error)
    try:
        await driver.start(SandboxSpec())
    except SandboxError as error:
        print(error)
    subprocess.run(["mount", "-o", "remount,size=50m,nr_inodes=9000", "none", base], check=True)
    print((await driver.start(SandboxSpec())).alive)
    await driver.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["bubblewrap", "local"])
@pytest.mark.parametrize("option", ["size=4k", "nr_inodes=2", "nr_inodes=4", "nr_inodes=12"])
def test_a_full_base_is_named_with_a_remedy(run_dir: Path, option: str, name: str) -> None:
    base = run_dir / "full"
    base.mkdir()
    mount = f'mount -t tmpfs -o {option} none {base} && exec "$@"'
    program = [sys.executable, "-W", "ignore", "-c", FULL, str(base), name]
    done = subprocess.run(
        ["unshare", "-U", "-r", "-m", "sh", "-c", mount, "", *program],
        capture_output=True,
        text=True,
        check=False,
    )
    base.rmdir()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in lines if option == "nr_inodes=2" else lines[:-1]:  # no driver without its own directory
        assert "No space left on device" in line and len(line) < 400
        assert "PRORL_RUN_DIR to a writable directory on a local disk with free space" in line
    assert len(lines) == 1 or lines[-1] == "True"


@pytest.mark.parametrize("length", [PATH_LIMIT, PATH_LIMIT + 1, 180])
def test_another_base_is_found_for_a_temporary_directory_with_a_long_path(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    long = run_dir / ("x" * (length - len(str(run_dir)) - 1))
    long.mkdir()
    monkeypatch.delenv("PRORL_RUN_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr("prorl_envs.sandbox.filesystem.directories._SHORT_BASES", (Path("/none"), run_dir))
    base = node_local_base()
    DriverDirectory(base).remove()
    assert node_local_base() == base == (long if length == PATH_LIMIT else run_dir)
    assert len(caplog.records) == (0 if length == PATH_LIMIT else 1), "and says so once"
    long.rmdir()


@pytest.mark.parametrize("how", ["variable", "argument"])
def test_a_run_directory_that_does_not_exist_is_created(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    wanted = run_dir / how / "run"  # a short path
    monkeypatch.setenv("PRORL_RUN_DIR", str(wanted if how == "variable" else run_dir / "other"))
    base = node_local_base(wanted if how == "argument" else None)
    assert base == wanted and stat.S_IMODE(wanted.stat().st_mode) == 0o700
    DriverDirectory(base).remove()
    assert not (run_dir / "other").exists()
    shutil.rmtree(run_dir / how)


def test_a_run_directory_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedMachine, match="file/run"):
        DriverDirectory(node_local_base(tmp_path / "file" / "run"))
