"""Snapshots: sandboxes started from another's files. The leak fixture checks each test."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.filesystem.snapshot import Snapshot
from tests.sandbox.rootfs import PROGRAMS, write_rootfs
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rootfs(tmp_path_factory.mktemp("image") / "root", (*PROGRAMS, "mv", "ln"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    path = tmp_path / "tree"
    (path / "package").mkdir(parents=True)
    for name in ("a", "b"):
        (path / "package" / name).write_text(f"{name} of the source\n")
    return path


@pytest.fixture
async def started(own_driver: BubblewrapDriver) -> AsyncIterator[Sandbox]:
    sandbox = await own_driver.start(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def fork(driver: BubblewrapDriver, sandbox: Sandbox) -> Sandbox:
    snapshot = await sandbox.snapshot()
    forked = await driver.start(snapshot.spec, snapshot=snapshot)
    await snapshot.remove()
    assert not snapshot.path.exists()
    return forked


async def test_a_copy_has_the_files_of_its_original(own_driver: BubblewrapDriver, started: Sandbox) -> None:
    await run_script(started, "echo work > w; echo home > ~/h; echo tmp > /tmp/t; ln -s w link")
    forked = await fork(own_driver, started)
    assert await run_script(forked, "cat link ~/h /tmp/t") == "work\nhome\ntmp\n"
    assert (forked.workspace / "w").read_text() == "work\n"


async def test_later_changes_are_not_shared(own_driver: BubblewrapDriver, started: Sandbox) -> None:
    await run_script(started, "echo before > file")
    forked = await fork(own_driver, started)
    await run_script(started, "echo first > file")
    await run_script(forked, "echo second > file; echo more > new")
    assert await run_script(started, "cat file; ls") == "first\nfile\n"
    assert await run_script(forked, "cat file; ls") == "second\nfile\nnew\n"


async def test_a_snapshot_serves_many_and_outlives_its_sandbox(
    own_driver: BubblewrapDriver, started: Sandbox
) -> None:
    await run_script(started, "echo kept > file")
    snapshot = await started.snapshot()
    await started.close()
    forks = await asyncio.gather(
        *(own_driver.start(snapshot.spec, snapshot=snapshot) for _ in range(4)),
    )
    for forked in forks:
        await run_script(forked, "echo more >> file")
    assert (snapshot.workspace / "file").read_text() == "kept\n"
    assert [await run_script(forked, "wc -l < file") for forked in forks] == ["2\n"] * 4


async def test_changes_and_deletions_in_an_overlay_are_kept(own_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/opt/tree", overlay=True),))
    sandbox = await own_driver.start(spec)
    script = "cd /opt/tree; rm package/a; mkdir other; echo new > other/n; echo changed > package/b"
    await run_script(sandbox, script)
    forked = await fork(own_driver, sandbox)
    look = "cd /opt/tree; find . -type f | sort; cat package/b"
    assert await run_script(forked, look) == "./other/n\n./package/b\nchanged\n"
    await run_script(forked, "cd /opt/tree; rm -r package; mkdir package; echo own > package/c")
    again = await fork(own_driver, forked)
    assert (
        await run_script(again, look) == "./other/n\n./package/c\ncat: package/b: No such file or directory\n"
    )


async def test_changes_in_an_image_are_kept(own_driver: BubblewrapDriver, image: Path) -> None:
    sandbox = await own_driver.start(SandboxSpec(image=image))
    await run_script(sandbox, "echo changed > /etc/image; rm /bin/id; mkdir /made; echo own > /made/file")
    forked = await fork(own_driver, sandbox)
    output = await run_script(forked, "cat /etc/image /made/file /etc/hostname; ls /bin")
    assert output.startswith("changed\nown\nsandbox\n")
    assert "id" not in output.split()
    assert (image / "etc" / "image").read_text() == "from the image\n"


async def test_the_environment_may_differ_but_the_mounts_may_not(
    own_driver: BubblewrapDriver, started: Sandbox, image: Path
) -> None:
    snapshot = await started.snapshot()
    spec = dataclasses.replace(started.spec, env={"NAME": "value"}, hostname="other")
    forked = await own_driver.start(spec, snapshot=snapshot)
    assert await run_script(forked, "echo $NAME; hostname") == "value\nother\n"
    for wrong in (SandboxSpec(image=image), SandboxSpec(workdir="/elsewhere"), SandboxSpec(uid=0)):
        with pytest.raises(SandboxError, match="another image"):
            await own_driver.start(wrong, snapshot=snapshot)


@pytest.mark.parametrize("place", ["/", "/oldroot/tmp", "../../../tmp"])
async def test_a_link_in_place_of_a_mount_point_is_refused(
    own_driver: BubblewrapDriver, image: Path, tree: Path, place: str
) -> None:
    spec = SandboxSpec(image=image, mounts=(Mount(source=tree, target="/data/inner/tree"),))
    sandbox = await own_driver.start(spec)
    # A mount point itself cannot be moved, but the directory above it can.
    script = f"mv /data/inner /data/moved && ln -s {place} /data/inner && echo done"
    assert await run_script(sandbox, script) == "done\n"
    snapshot = await sandbox.snapshot()
    with pytest.raises(SandboxError, match="mount point /data/inner/tree was replaced"):
        await own_driver.start(spec, snapshot=snapshot)


async def test_a_link_in_the_workspace_does_not_redirect_a_mount(
    own_driver: BubblewrapDriver, tree: Path, tmp_path: Path
) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/workspace/data/tree"),))
    sandbox = await own_driver.start(spec)
    (tmp_path / "outside").mkdir()
    script = f"mv data moved && ln -s /oldroot{tmp_path}/outside data && echo done"
    assert await run_script(sandbox, script) == "done\n"
    with pytest.raises(SandboxError, match="mount point /workspace/data/tree was replaced"):
        await fork(own_driver, sandbox)
    assert not list((tmp_path / "outside").iterdir())


async def test_a_closed_sandbox_has_no_snapshot(own_driver: BubblewrapDriver, started: Sandbox) -> None:
    await started.close()
    with pytest.raises(SandboxError, match="has ended"):
        await started.snapshot()


async def test_closing_the_sandbox_stops_the_copy(own_driver: BubblewrapDriver, started: Sandbox) -> None:
    await run_script(started, "for i in 1 2 3; do mkdir $i; (cd $i; touch $(seq 2000)); done")
    taking = [asyncio.create_task(started.snapshot()) for _ in range(3)]
    await asyncio.sleep(0)
    await started.close()
    outcomes = await asyncio.gather(*taking, return_exceptions=True)
    assert all(isinstance(outcome, SandboxError) for outcome in outcomes)
    await own_driver.aclose()


async def test_a_cancelled_snapshot_leaks_nothing(
    own_driver: BubblewrapDriver, started: Sandbox, run_dir: Path
) -> None:
    await run_script(started, "touch $(seq 3000)")
    before = sorted(path.name for path in started.workspace.parent.parent.iterdir())
    taking = asyncio.create_task(started.snapshot())
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert sorted(path.name for path in started.workspace.parent.parent.iterdir()) == before


async def test_a_failed_restore_leaks_nothing(own_driver: BubblewrapDriver, started: Sandbox) -> None:
    snapshot = await started.snapshot()
    gone = Snapshot(snapshot.spec, snapshot.path.with_name("gone"))
    with pytest.raises(SandboxError, match="cannot be copied"):
        await own_driver.start(gone.spec, snapshot=gone)
    assert own_driver.sandboxes == {started}


async def test_the_local_driver_supports_snapshots(run_dir: Path) -> None:
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver(templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec())
        await run_script(sandbox, "echo kept > file; echo home > ~/h")
        snapshot = await sandbox.snapshot()
        forked = await driver.start(snapshot.spec, snapshot=snapshot)
        assert await run_script(forked, "cat file ~/h") == "kept\nhome\n"
    finally:
        await driver.aclose()
