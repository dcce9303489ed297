"""Host paths in a sandbox: read-only, writable, copy-on-write, and hidden."""

from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.mount_plan import check
from tests.support.sandbox_entry import run_script

pytestmark = pytest.mark.anyio


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree on the host."""
    source = tmp_path / "tree"
    (source / "package" / "secret").mkdir(parents=True)
    (source / "file").write_text("original\n")
    (source / "package" / "secret" / "solution").write_text("42\n")
    return source


async def run_with(driver: BubblewrapDriver, spec: SandboxSpec, script: str) -> str:
    sandbox = await driver.start(spec)
    try:
        return await run_script(sandbox, script)
    finally:
        await sandbox.close()


async def test_a_mount_is_read_only(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/opt/tree"),))
    output = await run_with(shell_driver, spec, "LC_ALL=C; cat /opt/tree/file; echo x > /opt/tree/file")
    assert output.startswith("original\n")
    assert "Read-only file system" in output


async def test_a_single_file_can_be_mounted(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree / "file", target="/opt/one"),))
    assert await run_with(shell_driver, spec, "cat /opt/one") == "original\n"


async def test_a_writable_mount_writes_to_the_host(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/opt/tree", writable=True),))
    await run_with(shell_driver, spec, "echo changed > /opt/tree/file")
    assert (tree / "file").read_text() == "changed\n"


async def test_an_overlay_never_changes_its_source(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/opt/tree", overlay=True),))
    script = "cd /opt/tree && echo changed > file && rm -r package && mv file moved && cat moved && ls"
    assert await run_with(shell_driver, spec, script) == "changed\nmoved\n"
    assert (tree / "file").read_text() == "original\n"
    assert (tree / "package" / "secret" / "solution").exists()


async def test_sandboxes_with_one_source_do_not_share_changes(
    shell_driver: BubblewrapDriver, tree: Path
) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/opt/tree", overlay=True),))
    first = await shell_driver.start(spec)
    second = await shell_driver.start(spec)
    try:
        await run_script(first, "echo first > /opt/tree/file")
        assert await run_script(second, "cat /opt/tree/file") == "original\n"
        assert await run_script(first, "cat /opt/tree/file") == "first\n"
    finally:
        await first.close()
        await second.close()


async def test_the_workspace_itself_can_be_an_overlay(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(workdir="/testbed", mounts=(Mount(source=tree, target="/testbed", overlay=True),))
    assert await run_with(shell_driver, spec, "pwd; cat file; echo x > new && ls") == (
        "/testbed\noriginal\nfile\nnew\npackage\n"
    )


async def test_a_mask_is_an_empty_read_only_directory(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(
        mounts=(Mount(source=tree, target="/opt/tree"),), masks=("/opt/tree/package/secret", "/usr/games")
    )
    script = "ls -A secret /usr/games; touch secret/x; umount secret; rmdir secret"
    output = await run_with(shell_driver, spec, f"LC_ALL=C; cd /opt/tree/package; {script}; ls -A secret")
    assert "solution" not in output
    assert "Read-only file system" in output or "Permission denied" in output


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        *(
            (spec, "absolute")
            for path in ("work", "/work/../etc", "/", "/a\0b")
            for spec in (
                SandboxSpec(workdir=path),
                SandboxSpec(masks=(path,)),
                SandboxSpec(mounts=(Mount(source=Path("/usr"), target=path),)),
            )
        ),
        *(
            (SandboxSpec(hostname=name), "host name")
            for name in ("", "-a", "a b", "a\nb", "x" * 200, "--bind")
        ),
        (SandboxSpec(mounts=(Mount(source=Path("/usr"), target="/o", writable=True, overlay=True),)), "both"),
    ],
)
async def test_an_impossible_spec_is_refused(
    shell_driver: BubblewrapDriver, spec: SandboxSpec, word: str
) -> None:
    with pytest.raises(SandboxError, match=word):
        await shell_driver.start(spec)


def test_an_emulated_root_may_work_in_the_root_directory() -> None:
    check(SandboxSpec(workdir="/", emulate_root=True, uid=0, image=Path("/image")))


async def test_a_missing_source_is_named_with_a_remedy(
    shell_driver: BubblewrapDriver, tmp_path: Path
) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tmp_path / "absent", target="/opt/x"),))
    with pytest.raises(SandboxError, match="absent") as caught:
        await shell_driver.start(spec)
    assert "must exist" in caught.value.hint


async def test_a_target_that_cannot_be_made_is_named(shell_driver: BubblewrapDriver, tree: Path) -> None:
    spec = SandboxSpec(mounts=(Mount(source=tree, target="/usr/absent/deep"),))
    with pytest.raises(SandboxError, match="/usr/absent") as caught:
        await shell_driver.start(spec)
    assert "must exist" in caught.value.hint
