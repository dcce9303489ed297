"""The driver without isolation: it prints a warning, and otherwise has the same contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Driver, Mount, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from tests.support.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

pytestmark = pytest.mark.anyio


@pytest.fixture
async def local_driver(run_dir: Path) -> AsyncIterator[LocalDriver]:
    with pytest.warns(NoIsolationWarning, match="isolates nothing"):
        driver = LocalDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


async def test_a_command_has_its_own_directory_and_environment(local_driver: LocalDriver) -> None:
    assert isinstance(local_driver, Driver)
    sandbox = await local_driver.start(SandboxSpec(env={"GREETING": "hello"}))
    assert isinstance(sandbox, Sandbox)
    assert await run_script(sandbox, "pwd; echo $GREETING; umask") == f"{sandbox.workspace}\nhello\n0022\n"
    await sandbox.close()
    await sandbox.close()
    assert not sandbox.alive
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.spawn(RUN_SCRIPTS)


async def test_closing_kills_detached_processes(local_driver: LocalDriver) -> None:
    for _ in range(10):  # some are found during their exec
        sandbox = await local_driver.start(SandboxSpec())
        with await sandbox.spawn(RUN_SCRIPTS) as sock:
            pid = (await ask(sock, "setsid sleep 600 > /dev/null 2>&1 & echo $!")).strip()
            await sandbox.close()
        assert state_of(pid) in ("gone", "Z")


def state_of(pid: str) -> str:
    process = Path("/proc", pid, "stat")
    return process.read_text().rpartition(")")[2].split()[0] if process.exists() else "gone"


async def test_mounts_are_refused_and_not_ignored(local_driver: LocalDriver, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot mount"):
        await local_driver.start(SandboxSpec(mounts=(Mount(source=tmp_path, target="/testbed"),)))
