"""Images as the root file system: directories and SIF files. The leak fixture checks each test."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.drivers.select import make_driver
from prorl_envs.sandbox.filesystem import sif_mounts
from prorl_envs.sandbox.filesystem.directories import sweep
from prorl_envs.sandbox.filesystem.images import Images
from prorl_envs.sandbox.filesystem.layered import LayerTree
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.filesystem.sif_mounts import find_program, mount, unmount_below
from prorl_envs.tools.client.toolbox import Toolbox
from tests.places import drivers_directory
from tests.sandbox.conftest import scripted_driver
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_busybox_rootfs, write_rootfs
from tests.support.leaks import OpenResources, leaks_since
from tests.support.sandbox_entry import IMPORT_LATE, RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory in memory: many tests have their own driver."""
    yield from drivers_directory(in_memory=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rootfs(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module")
def sif(directory: Path) -> Path:
    if reason := missing_for_sif():
        pytest.skip(reason)
    return build_sif(directory, directory.parent / "image.sif")


@pytest.fixture(params=["directory", "sif"])
def image(request: pytest.FixtureRequest) -> Path:
    """An image of either kind, with the same content."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
async def driver(run_dir: Path, driver_name: str) -> AsyncIterator[BubblewrapDriver]:
    """Driver for a single test: its mounts are unmounted at the end of the test."""
    driver = scripted_driver(driver_name)
    yield driver
    await driver.aclose()


def fuse_mounts(run_dir: Path) -> list[str]:
    """Return the mount points of squashfuse below the run directory."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if " fuse.squashfuse" in line and str(run_dir) in line]


def squashfuse_pids(run_dir: Path) -> dict[int, str]:
    processes = OpenResources.now(run_dir).processes
    return {pid: text for (pid, _), text in processes.items() if "(squashfuse" in text}


async def test_the_system_is_the_images_and_the_hosts_is_hidden(
    driver: BubblewrapDriver, image: Path, tmp_path: Path
) -> None:
    (tmp_path / "host").touch()
    sandbox = await driver.start(SandboxSpec(image=image, hostname="box"))
    assert await run_script(sandbox, "cat /etc/image /etc/hostname; pwd; id -un") == (
        "from the image\nbox\n/workspace\nagent\n"
    )
    assert "python" not in await run_script(sandbox, "ls /bin")
    for path in (tmp_path, Path(sys.prefix), Path("/usr/bin"), Path("/etc/shadow")):
        assert await run_script(sandbox, f"test -e {path} || echo absent") == "absent\n"
    assert await run_script(sandbox, "set -- /proc/[0-9]*; test $# -le 4 && echo alone") == "alone\n"
    await sandbox.close()


async def test_a_bash_action_works(run_dir: Path, driver_name: str, image: Path) -> None:
    driver = make_driver(driver_name)
    try:
        sandbox = await driver.start(SandboxSpec(image=image))
        toolbox = await Toolbox.open(sandbox)
        await toolbox.bash("cd /opt && name=value", timeout_s=30)
        result = await toolbox.bash('echo "$PWD $name"; cat /etc/image', timeout_s=30)
        assert result.ok
        assert result.text == "/opt value\nfrom the image\n"
        await toolbox.aclose()
    finally:
        await driver.aclose()


async def test_the_workspace_is_visible_on_the_host(driver: BubblewrapDriver, image: Path) -> None:
    sandbox = await driver.start(SandboxSpec(image=image))
    await run_script(sandbox, "echo kept > file")
    assert (sandbox.workspace / "file").read_text() == "kept\n"
    await sandbox.close()


async def test_changes_belong_to_a_sandbox_and_never_to_the_image(
    driver: BubblewrapDriver, image: Path, directory: Path
) -> None:
    first = await driver.start(SandboxSpec(image=image))
    second = await driver.start(SandboxSpec(image=image))
    script = "mkdir /made && echo own > /made/file && cat /made/file"
    assert await run_script(first, script) == "own\n"
    assert "made" not in await run_script(second, "ls /")
    await first.close()
    third = await driver.start(SandboxSpec(image=image))
    assert "made" not in await run_script(third, "ls /")
    assert not (directory / "made").exists()
    await second.close()
    await third.close()


async def test_a_directory_images_files_can_be_changed_in_the_sandbox_only(
    driver: BubblewrapDriver, directory: Path
) -> None:
    sandbox = await driver.start(SandboxSpec(image=directory))
    script = "echo changed > /etc/image; rm /bin/id; cat /etc/image; ls /bin"
    output = await run_script(sandbox, script)
    assert output.startswith("changed\n")
    assert "id" not in output.split()
    assert (directory / "etc" / "image").read_text() == "from the image\n"
    assert (directory / "bin" / "id").exists()
    await sandbox.close()


async def test_the_sandboxes_of_a_driver_share_one_mount(
    driver: BubblewrapDriver, sif: Path, run_dir: Path
) -> None:
    sandboxes = await asyncio.gather(*(driver.start(SandboxSpec(image=sif)) for _ in range(4)))
    assert len(fuse_mounts(run_dir)) == 1
    assert len(squashfuse_pids(run_dir)) == 1
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes[1:]))
    assert await run_script(sandboxes[0], "cat /etc/image") == "from the image\n"
    await driver.aclose()
    assert fuse_mounts(run_dir) == []


async def test_a_mount_whose_squashfuse_died_is_removed(
    driver: BubblewrapDriver, sif: Path, run_dir: Path
) -> None:
    await driver.start(SandboxSpec(image=sif))
    while len(found := squashfuse_pids(run_dir)) > 1:  # noqa: ASYNC110 - one of them is about to be another program
        await asyncio.sleep(0.01)
    (pid,) = found
    squashfuse = os.pidfd_open(pid)
    signal.pidfd_send_signal(squashfuse, signal.SIGKILL)
    select.select([squashfuse], [], [])
    os.close(squashfuse)
    await driver.aclose()
    assert fuse_mounts(run_dir) == []


async def test_unused_images_over_the_limit_are_unmounted(sif: Path, run_dir: Path) -> None:
    images = Images(run_dir, idle_limit=0)
    first, second = await images.acquire(sif), await images.acquire(sif)
    await images.release(first)
    assert (second.layers[0] / "etc" / "image").read_text() == "from the image\n"
    await images.release(second)
    assert fuse_mounts(run_dir) == []
    again = await images.acquire(sif)
    assert fuse_mounts(run_dir) == [str(again.layers[0])]
    await images.aclose()


async def test_a_start_cancelled_while_mounting_leaves_nothing(driver: BubblewrapDriver, sif: Path) -> None:
    for delay_ms in (0, 5, 20, 40):
        start = asyncio.create_task(driver.start(SandboxSpec(image=sif)))
        await asyncio.wait([start], timeout=delay_ms / 1000)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


SERVICE = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver
from tests.support.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask

async def main():
    driver = make_driver(sys.argv[2], templates=SCRIPT_TEMPLATES)
    sandbox = await driver.start(SandboxSpec(image=Path(sys.argv[1])))
    sock = await sandbox.spawn(RUN_SCRIPTS)
    await ask(sock, "(setsid sleep 600 > /dev/null 2>&1 &)")
    print("busy", flush=True)
    await ask(sock, "sleep 600")

asyncio.run(main())
"""


def test_a_killed_service_leaks_no_process_and_no_mount_and_its_files_are_removed(
    image: Path, run_dir: Path, driver_name: str
) -> None:
    before = OpenResources.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, str(image), driver_name], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "busy\n"
        service.kill()
    asyncio.run(BubblewrapDriver().aclose())  # the next driver removes them
    assert leaks_since(before, run_dir) == []
    assert fuse_mounts(run_dir) == []


MOUNTER = """\
import sys
from pathlib import Path
from prorl_envs.sandbox.filesystem import directories, sif_mounts

sif_mounts._PROGRAMS = f"{sys.argv[3]}:{sif_mounts._PROGRAMS}"
sif_mounts.mount(Path(sys.argv[1]), directories.DriverDirectory(Path(sys.argv[2])).path)
"""


@pytest.mark.parametrize(
    "script", ['touch "$0.begun"; sleep 0.3; exec REAL "$@"', 'REAL "$@"; touch "$0.begun"; sleep 0.3']
)
def test_a_service_killed_while_it_mounts_leaks_no_mount(
    sif: Path, run_dir: Path, tmp_path: Path, script: str
) -> None:
    slow = tmp_path / "squashfuse_ll"
    slow.write_text("#!/bin/sh\n" + script.replace("REAL", find_program("squashfuse_ll", "squashfuse")))
    slow.chmod(0o755)
    base = run_dir / "mounts"
    base.mkdir()
    before = OpenResources.now(run_dir)
    with subprocess.Popen([sys.executable, "-c", MOUNTER, str(sif), str(base), str(tmp_path)]) as service:
        while not slow.with_suffix(".begun").exists():
            assert service.poll() is None
            time.sleep(0.005)
        service.kill()
    assert leaks_since(before, run_dir) == []
    assert len(sweep(base)) == 1
    base.rmdir()


def test_an_image_that_its_keeper_unmounts_at_the_same_time_counts_as_unmounted(
    sif: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run_dir / "mounts"
    base.mkdir()
    mounted = mount(sif, base)
    program = find_program("fusermount3", "fusermount")
    late = tmp_path / Path(program).name
    late.write_text(f'#!/bin/sh\n{program} "$@" && exec {program} "$@"\n')
    late.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sif_mounts, "_PROGRAMS", f"{tmp_path}:{sif_mounts._PROGRAMS}")
        unmount_below(base)
    assert fuse_mounts(run_dir) == []
    mounted.release()
    base.rmdir()


def test_an_image_that_cannot_be_unmounted_is_reported(
    sif: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = run_dir / "mounts"
    base.mkdir()
    mounted = mount(sif, base)
    failing = tmp_path / Path(find_program("fusermount3", "fusermount")).name
    failing.write_text("#!/bin/sh\necho busy >&2\nexit 1\n")
    failing.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sif_mounts, "_PROGRAMS", f"{tmp_path}:{sif_mounts._PROGRAMS}")
        with pytest.raises(SandboxError, match="busy"):
            unmount_below(base)
    mounted.release()
    base.rmdir()


async def test_targets_are_resolved_through_the_images_links(
    driver: BubblewrapDriver, tmp_path: Path
) -> None:
    root = write_rootfs(tmp_path / "root")
    (root / "data").symlink_to("/opt")
    (root / "opt" / "secret").mkdir()
    (root / "opt" / "secret" / "solution").touch()
    (tmp_path / "file").write_text("bound\n")
    spec = SandboxSpec(
        image=root,
        workdir="/data/work",
        mounts=(Mount(source=tmp_path / "file", target="/data/deep/file"),),
        masks=("/data/secret",),
    )
    sandbox = await driver.start(spec)
    assert await run_script(sandbox, "pwd; cat /opt/deep/file; ls /opt/secret; ls /opt") == (
        "/opt/work\nbound\ndeep\nsecret\nwork\n"
    )
    assert replace(sandbox.spec, limits=None) == spec
    await sandbox.close()


@pytest.mark.parametrize(
    ("target", "means"),
    [
        ("/plain/x", "/plain/x"),
        ("/absolute/x", "/etc/x"),
        ("/climbing", "/etc"),
        ("/chain/x", "/etc/x"),
        ("/outside", "/oldroot/etc"),
    ],
)
def test_links_are_resolved_only_inside_the_image(tmp_path: Path, target: str, means: str) -> None:
    for name, aim in [
        ("absolute", "/etc"),
        ("climbing", "../../../etc"),
        ("chain", "absolute"),
        ("outside", "/oldroot/etc"),
    ]:
        (tmp_path / name).symlink_to(aim)
    assert LayerTree([tmp_path]).resolve(target) == means


def test_circular_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(SandboxError, match="forms a loop"):
        LayerTree([tmp_path]).resolve("/a")


async def test_an_image_whose_tmp_is_a_link_is_refused(driver: BubblewrapDriver, tmp_path: Path) -> None:
    root = write_rootfs(tmp_path / "root")
    (root / "tmp").rmdir()
    (root / "tmp").symlink_to("/oldroot/tmp")
    with pytest.raises(SandboxError, match="/tmp is not a directory"):
        await driver.start(SandboxSpec(image=root))


async def test_an_image_without_a_shell_is_refused_with_the_reason(
    driver: BubblewrapDriver, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError, match="/bin/sh") as caught:
        await driver.start(SandboxSpec(image=write_rootfs(tmp_path / "root", ())))
    assert "an image needs" in str(caught.value)


async def test_a_file_that_is_no_image_is_refused(driver: BubblewrapDriver, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no image")
    with pytest.raises(SandboxError, match="not an image"):
        await driver.start(SandboxSpec(image=tmp_path / "file"))
    with pytest.raises(SandboxError, match="cannot read"):
        await driver.start(SandboxSpec(image=tmp_path / "absent"))


async def test_a_truncated_sif_is_refused(driver: BubblewrapDriver, sif: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.sif"
    shutil.copy(sif, cut)
    os.truncate(cut, cut.stat().st_size - 4096)
    with pytest.raises(SandboxError, match="cut short"):
        await driver.start(SandboxSpec(image=cut))


async def test_a_busybox_is_enough_for_an_image(
    run_dir: Path, driver_name: str, tmp_path: Path, busybox: str
) -> None:
    image = write_busybox_rootfs(tmp_path / "root", busybox)
    driver = scripted_driver(driver_name)
    tools = make_driver(driver_name)
    try:
        sandbox = await driver.start(SandboxSpec(image=image))
        with await sandbox.spawn(RUN_SCRIPTS) as sock:
            for _ in range(3):  # orphans, which the first process must reap and outlive
                assert await ask(sock, "(setsid sleep 0.01 &); cat /etc/image") == "from the image\n"
        assert sandbox.alive
        toolbox = await Toolbox.open(await tools.start(SandboxSpec(image=image)))
        assert (await toolbox.bash("cat /etc/image", timeout_s=30)).text.startswith("from the image\n")
        await toolbox.aclose()
    finally:
        await tools.aclose()
        await driver.aclose()


async def test_a_tool_server_imports_nothing_from_the_sandbox(driver: BubblewrapDriver) -> None:
    """An agent could write a module with a well-known name into the image's writable system."""
    mounts, masks, env = python_runtime()
    sandbox = await driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    with await sandbox.spawn(IMPORT_LATE) as sock:
        assert await ask(sock, "this") == "not found"
    await sandbox.close()


async def test_the_local_driver_refuses_images(run_dir: Path, directory: Path) -> None:
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver(templates=SCRIPT_TEMPLATES)
    with pytest.raises(SandboxError, match="image"):
        await driver.start(SandboxSpec(image=directory))
    await driver.aclose()
