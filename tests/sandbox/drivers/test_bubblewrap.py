"""The bubblewrap driver: start of a sandbox, and features that the conformance suite does not cover."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_envs.conformance.static_program import static_program
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.places import drivers_directory
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_rootfs
from tests.support.leaks import OpenResources, leaks_since
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory in memory: many tests have their own driver."""
    yield from drivers_directory(in_memory=True)


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    driver = BubblewrapDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


@pytest.mark.parametrize("hostname", ["", "other"])
async def test_equal_sandboxes_share_no_directories(
    driver: BubblewrapDriver, hostname: str, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    overlay = Mount(source=tmp_path / "shared", target="/over", overlay=True)
    spec = SandboxSpec(mounts=(overlay,))
    if hostname:
        spec = replace(spec, hostname=hostname)
    first, second = await driver.start(spec), await driver.start(spec)
    everywhere = "/workspace /tmp /home/agent /over"
    for sandbox in (first, second):
        script = f"ls {everywhere} | grep x; for f in {everywhere}; do echo {sandbox.id} > $f/x; done"
        assert await run_script(sandbox, script) == ""
    assert await run_script(first, "cat /workspace/x /tmp/x /home/agent/x /over/x") == f"{first.id}\n" * 4
    assert (first.workspace / "x").read_text() == f"{first.id}\n"
    assert (second.workspace / "x").read_text() == f"{second.id}\n"
    await first.close()
    third = await driver.start(spec)
    assert await run_script(third, f"ls {everywhere} | grep x; hostname") == f"{spec.hostname}\n"
    await third.close()
    await second.close()


async def test_each_sandbox_has_the_properties_of_its_spec(driver: BubblewrapDriver, tmp_path: Path) -> None:
    mount = Mount(source=tmp_path, target="/mounted")
    specs = (
        SandboxSpec(),
        SandboxSpec(uid=7),
        SandboxSpec(workdir="/elsewhere"),
        SandboxSpec(env={"NAME": "value"}),
        SandboxSpec(hostname="other"),
        SandboxSpec(mounts=(mount,)),
        SandboxSpec(mounts=(replace(mount, writable=True),)),
        SandboxSpec(masks=("/usr/share",)),
    )
    sandboxes = [await driver.start(spec) for spec in specs]
    script = "id -u; pwd; echo $NAME; hostname; test -w /mounted; echo $?; ls /usr/share | wc -l"
    said = [(await run_script(sandbox, script)).split("\n") for sandbox in sandboxes]
    assert said[1][0] == "7"
    assert said[2][1] == "/elsewhere"
    assert [lines[2] for lines in said] == ["", "", "", "value", "", "", "", ""]
    assert said[4][3] == "other"
    assert [lines[4] for lines in said] == ["1", "1", "1", "1", "1", "1", "0", "1"]
    assert [lines[5] == "0" for lines in said] == [False] * 7 + [True]
    for sandbox in sandboxes:
        await sandbox.close()


async def test_a_source_may_be_a_directory_and_later_a_file(driver: BubblewrapDriver, tmp_path: Path) -> None:
    source = tmp_path / "source"
    spec = SandboxSpec(mounts=(Mount(source=source, target="/made/here"),))
    for _ in range(2):
        source.mkdir()
        (source / "file").write_text("in a directory")
        sandbox = await driver.start(spec)
        assert await run_script(sandbox, "cat /made/here/file") == "in a directory"
        await sandbox.close()
        shutil.rmtree(source)
        source.write_text("a file")
        sandbox = await driver.start(spec)
        assert await run_script(sandbox, "cat /made/here") == "a file"
        await sandbox.close()
        source.unlink()


async def test_a_source_is_the_current_one_at_its_path(driver: BubblewrapDriver, tmp_path: Path) -> None:
    source, target = (
        tmp_path / "source",
        SandboxSpec(mounts=(Mount(source=tmp_path / "source", target="/x"),)),
    )
    for content in ("one", "two"):
        source.mkdir()
        (source / "file").write_text(content)
        sandbox = await driver.start(target)
        assert await run_script(sandbox, "cat /x/file") == content
        await sandbox.close()
        shutil.rmtree(source)


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(mounts=(Mount(source=Path("/a\0b"), target="/x"),)),
        SandboxSpec(env={"NAME": "a\0b"}),
        SandboxSpec(env={"NA\0ME": "b"}),
    ],
    ids=["source", "variable", "name"],
)
async def test_a_zero_byte_is_refused(driver: BubblewrapDriver, spec: SandboxSpec) -> None:
    with pytest.raises(SandboxError, match="zero byte"):
        await driver.start(spec)
    assert not driver.sandboxes


async def test_a_failing_step_is_named(driver: BubblewrapDriver, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    spec = SandboxSpec(mounts=(Mount(source=gone, target="/here"),))
    gone.rmdir()
    with pytest.raises(SandboxError, match=r"source path .*gone: No such file") as caught:
        await driver.start(spec)
    assert "must exist" in caught.value.hint
    with pytest.raises(SandboxError, match="Can't mkdir /usr/no-such-place: Read-only"):
        await driver.start(SandboxSpec(mounts=(Mount(source=tmp_path, target="/usr/no-such-place"),)))
    assert not driver.sandboxes


async def test_a_source_behind_links_is_resolved_on_the_host(
    driver: BubblewrapDriver, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("found")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "a,b:c\\d").mkdir()
    mounts = (
        Mount(source=tmp_path / "link", target="/bound"),
        Mount(source=tmp_path / "link" / "file", target="/made/for/it"),
        Mount(source=tmp_path / "link", target="/over", overlay=True),
        Mount(source=tmp_path / "a,b:c\\d", target="/odd", overlay=True),
    )
    sandbox = await driver.start(SandboxSpec(mounts=mounts))
    script = "cat /bound/file /made/for/it /over/file; echo more > /over/file; touch /odd/x && ls /odd"
    assert await run_script(sandbox, script) == "foundfoundfoundx\n"
    assert (tmp_path / "real" / "file").read_text() == "found"
    await sandbox.close()


@pytest.fixture(params=["directory", "sif"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], Path]:
    """Make an image of a root file system."""
    if request.param == "sif" and (missing := missing_for_sif()):
        pytest.skip(missing)
    return (
        (lambda root: build_sif(root, tmp_path / "image.sif"))
        if request.param == "sif"
        else (lambda root: root)
    )


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("", "execvp /bin/sh: No such file or directory"),
        ("false", "execvp /bin/sh: it ended at once"),
        ("another machine's", "execvp /bin/sh: Exec format error"),
    ],
    ids=["none", "fails", "another machine's"],
)
async def test_an_image_whose_shell_cannot_run_is_refused(
    driver: BubblewrapDriver, packed: Callable[[Path], Path], tmp_path: Path, shell: str, said: str
) -> None:
    root = write_rootfs(tmp_path / "root", ("false",))
    if shell == "false":
        (root / "bin" / "false").rename(root / "bin" / "sh")
    elif shell:
        other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
        (root / "bin" / "sh").write_bytes(static_program(other))
        (root / "bin" / "sh").chmod(0o755)
    image = packed(root)
    for _ in range(2):  # first with a new program, then with a cached one
        with pytest.raises(SandboxError, match=said) as caught:
            await driver.start(SandboxSpec(image=image))
        assert "an image needs a `/bin/sh`" in caught.value.hint
    assert not driver.sandboxes


STARTING = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver

async def main():
    driver = BubblewrapDriver()
    await driver.warm("base")
    print(driver.starter.pid, flush=True)
    # So many that it takes a while.
    mounts = tuple(Mount(source=Path("/usr"), target=f"/m{i}") for i in range(500))
    await driver.start(SandboxSpec(mounts=mounts))
    print("started", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("whom", ["service", "starter"])
def test_a_process_killed_during_a_start_leaks_nothing(run_dir: Path, whom: str, after_s: float) -> None:
    before = OpenResources.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        starter = int(service.stdout.readline())
        time.sleep(after_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(service.pid if whom == "service" else starter, signal.SIGKILL)
        said, errors = service.communicate(timeout=60)
    assert service.returncode == -signal.SIGKILL or said == "started\n" or "SandboxError" in errors
    asyncio.run(BubblewrapDriver().aclose())  # the next driver removes them
    assert leaks_since(before, run_dir) == []
