"""Transfers of trees and large files to and from real sandboxes."""

import asyncio
from pathlib import Path

import pytest

from prorl_envs.errors import InputError, SandboxError, ToolError, TransferRefused
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import CONTENT_LIMIT
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits

pytestmark = pytest.mark.anyio
T = 60.0


async def shell(box: Toolbox, script: str) -> str:
    done = await box.run(["bash", "-c", script], timeout_s=T)
    return done.output.decode(errors="replace")


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def under_way(folder: Path) -> bool:
    """Return whether a file is being written."""
    return any(folder.glob(".prorl-*/tree/.*.tmp"))


async def test_a_tree_is_uploaded_and_downloaded_unchanged(box: Toolbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "deeper").mkdir(parents=True)
    (source / "run.sh").write_bytes(b"#!/bin/sh\necho hi\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "deeper" / "data").write_bytes(bytes(range(256)) * 5000)
    (source / "sub" / "link").symlink_to("../run.sh")
    sent = await box.upload(source, "/workspace/new/place", timeout_s=T)
    assert sent == Transferred(6, 1_280_018)
    assert await shell(box, "new/place/sub/link; stat -c %a new/place/run.sh") == "hi\n755\n"
    got = await box.download("/workspace/new/place", tmp_path / "back", timeout_s=T)
    assert got == sent
    assert (tmp_path / "back" / "sub" / "deeper" / "data").read_bytes() == bytes(range(256)) * 5000
    assert (tmp_path / "back" / "sub" / "link").readlink() == Path("../run.sh")
    assert (tmp_path / "back" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert nothing_but(tmp_path, "source", "back")


async def test_the_workspace_itself_can_be_filled_and_downloaded(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "mkdir tests; echo old > tests/a; echo mine > tests/b; ln -s /etc/passwd tests/c")
    (tmp_path / "up" / "tests").mkdir(parents=True)
    (tmp_path / "up" / "tests" / "a").write_text("new\n")
    (tmp_path / "up" / "tests" / "c").write_text("a file\n")
    await box.upload(tmp_path / "up", "/workspace", timeout_s=T)
    assert await shell(box, "cat tests/*") == "new\nmine\na file\n"
    await box.download("/workspace", tmp_path / "down", timeout_s=T)
    assert nothing_but(tmp_path / "down" / "tests", "a", "b", "c")


async def test_a_file_larger_than_a_frame_is_transferred(box: Toolbox, tmp_path: Path) -> None:
    size = CONTENT_LIMIT + 5_000_000
    with (tmp_path / "big").open("wb") as file:
        file.truncate(size - 1)
        file.seek(size - 1)
        file.write(b"!")
    assert await box.upload(tmp_path / "big", "/workspace/big", timeout_s=T) == Transferred(1, size)
    assert await shell(box, "stat -c %s big; tail -c 1 big") == f"{size}\n!"
    assert await box.download("/workspace/big", tmp_path / "back", timeout_s=T) == Transferred(1, size)
    assert (tmp_path / "back").stat().st_size == size


async def test_two_thousand_files_are_transferred(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "mkdir -p t/{a..j}; for d in t/*; do (cd $d; seq 200 | xargs touch); done")
    done = await box.download("/workspace/t", tmp_path / "t", timeout_s=T)
    assert done.entries == 2_011
    assert sum(1 for _ in (tmp_path / "t").rglob("*")) == 2_010


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("mkfifo t/pipe", "pipe is a device, pipe or socket"),
        ("ln -s /etc/passwd t/x", "x is a link that leads out"),
        ("ln -s ../../x t/x", "x is a link that leads out"),
        (r"touch t/$'\xff'", "not UTF-8"),
        (
            "python3 -c \"import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1000)]\"; mv d t",
            "too deep",
        ),
        ("d=t; for n in {1..100}; do d=$d/d; done; mkdir -p $d", "too deep"),
        ("truncate -s 8G t/huge", "more than 1073741824 bytes"),
    ],
)
async def test_unsafe_trees_are_refused_and_leave_nothing(
    box: Toolbox, tmp_path: Path, script: str, said: str
) -> None:
    await shell(box, f"mkdir t; touch t/good; {script}")
    with pytest.raises(TransferRefused, match=said):
        await box.download("/workspace/t", tmp_path / "t", timeout_s=T)
    assert nothing_but(tmp_path)


async def test_unsupported_files_can_be_skipped_and_are_named(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "mkdir t; touch t/good; mkfifo t/pipe; ln -s /etc t/etc; ln t/good t/hard")
    done = await box.download("/workspace/t", tmp_path / "t", timeout_s=T, skip_unsupported=True)
    assert done.left_out_count == 2
    assert done.left_out[0] == "etc is a link that leads out of the tree"
    assert nothing_but(tmp_path / "t", "good", "hard")


async def test_a_link_as_the_source_is_followed_inside(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "mkdir t; echo x > t/f; ln -s t l; ln -s /etc/hostname h")
    await box.download("/workspace/l", tmp_path / "t", timeout_s=T)
    assert nothing_but(tmp_path / "t", "f")
    await box.download("/workspace/h", tmp_path / "h", timeout_s=T)
    assert (tmp_path / "h").read_text() == "sandbox\n"


@pytest.mark.parametrize(
    ("source", "error"),
    [("/workspace/none", FileNotFoundError), ("relative", OSError), ("/dev/zero", TransferRefused)],
)
async def test_an_unreadable_source_is_refused(
    box: Toolbox, tmp_path: Path, source: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await box.download(source, tmp_path / "t", timeout_s=T)
    assert nothing_but(tmp_path)


async def test_an_unwritable_target_is_refused(box: Toolbox, tmp_path: Path) -> None:
    (tmp_path / "t" / "a").mkdir(parents=True)
    (tmp_path / "t" / "a" / "f").write_bytes(b"x" * 3_000_000)
    with pytest.raises(OSError, match="Read-only"):
        await box.upload(tmp_path / "t", "/usr/new", timeout_s=T)
    with pytest.raises(FileNotFoundError):
        await box.upload(tmp_path / "none", "/workspace/t", timeout_s=T)
    await shell(box, "mkdir t; ln -s /tmp t/a")
    with pytest.raises(OSError):
        await box.upload(tmp_path / "t", "/workspace/t", timeout_s=T)
    assert await shell(box, "ls /tmp") == ""


async def test_files_of_the_host_are_not_overwritten(box: Toolbox, tmp_path: Path) -> None:
    (tmp_path / "t").symlink_to("elsewhere")
    with pytest.raises(InputError, match="exists already"):
        await box.download("/workspace", tmp_path / "t", timeout_s=T)
    assert nothing_but(tmp_path, "t")


async def test_cancelled_and_late_transfers_leave_nothing(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "mkdir t; truncate -s 1000M t/big")
    call = asyncio.create_task(box.download("/workspace/t", tmp_path / "t", timeout_s=T))
    while not under_way(tmp_path):
        await asyncio.sleep(0)
        assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert nothing_but(tmp_path)
    with pytest.raises(ToolError, match=r"did not end within 0\.05 s"):
        await box.download("/workspace/t", tmp_path / "t", timeout_s=0.05)
    assert nothing_but(tmp_path)
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"


async def test_a_sandbox_that_closes_is_reported(shared_driver: BubblewrapDriver, tmp_path: Path) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    box = await Toolbox.open(sandbox)
    await shell(box, "mkdir t; truncate -s 1000M t/big")
    call = asyncio.create_task(box.download("/workspace/t", tmp_path / "t", timeout_s=T))
    while not under_way(tmp_path):
        await asyncio.sleep(0)
        assert not call.done()
    await sandbox.close()
    with pytest.raises(SandboxError):
        await call
    assert nothing_but(tmp_path)
    await box.aclose()


async def test_a_tree_that_changes_while_it_is_read_is_transferred_or_refused(
    box: Toolbox, tmp_path: Path
) -> None:
    # A racer swaps a directory for a link out of the tree, and a file for a pipe, as fast as it can.
    racer = (
        "mkdir -p t/d /tmp/out; echo secret > /tmp/out/secret; echo x > t/d/x; touch t/f begun; "
        "while :; do mv t/d t/e; ln -s /tmp/out t/d; rm t/d; mv t/e t/d; rm -f t/f; "
        " mkfifo t/f; rm t/f; touch t/f; done"
    )
    running = asyncio.create_task(box.run(["bash", "-c", racer], timeout_s=T))
    await shell(box, "until [ -e begun ]; do sleep 0.01; done")
    for number in range(30):
        try:
            await box.download("/workspace/t", tmp_path / f"{number}", timeout_s=T, skip_unsupported=True)
        except (TransferRefused, OSError):
            continue
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert harmless(tmp_path)


def harmless(folder: Path) -> bool:
    return not any(path.is_symlink() or path.name == "secret" for path in folder.rglob("*"))


async def test_uploads_and_downloads_run_in_parallel(box: Toolbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 300_000)
    await asyncio.gather(*(box.upload(tmp_path / "f", f"/workspace/{n}", timeout_s=T) for n in range(10)))
    await asyncio.gather(
        *(box.download(f"/workspace/{n}", tmp_path / f"{n}", timeout_s=T) for n in range(10))
    )
    assert all((tmp_path / f"{n}").stat().st_size == 300_000 for n in range(10))


async def test_a_caller_may_set_its_own_limits(box: Toolbox, tmp_path: Path) -> None:
    await shell(box, "touch a b c")
    with pytest.raises(TransferRefused, match="more than 3 entries"):
        await box.download("/workspace", tmp_path / "t", timeout_s=T, limits=TreeLimits(entries=3))
