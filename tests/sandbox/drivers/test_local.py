"""The driver without isolation: it prints a warning, and otherwise has the same contract."""

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Driver, Mount, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.filesystem.directories import sweep
from tests.support.sandbox_entry import FORK, RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

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


async def test_closing_kills_a_child_that_has_not_started_its_program(local_driver: LocalDriver) -> None:
    sandbox = await local_driver.start(SandboxSpec())
    with await sandbox.spawn(FORK) as sock:
        pid = (await asyncio.get_running_loop().sock_recv(sock, 64)).rstrip(b"\0").decode()
        await sandbox.close()
    assert state_of(pid) in ("gone", "Z")


#: Each program inherits descriptor 9: a loop, one that ignores signals, a stopped one, one without the
#: sandbox's variables, and processes that each start the next and exit.
HOSTILE = (
    "exec > /dev/null 2>&1 9> {fifo}; (while :; do (sleep 0.01); done) & "
    "setsid sh -c 'trap \"\" TERM HUP INT; while :; do (sleep 0.01); done' & "
    "sh -c 'kill -STOP $$' & env -i setsid sleep 600 & next() {{ sleep 0.01; next & }}; next & echo on >&9"
)

SERVICE = """\
import asyncio, sys, warnings
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.local import LocalDriver
from tests.support.sandbox_entry import FORK, RUN_SCRIPTS, SCRIPT_TEMPLATES, ask

warnings.simplefilter("ignore")

async def main():
    driver = LocalDriver(templates=SCRIPT_TEMPLATES)
    sandbox = await driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        await ask(sock, sys.argv[1])
        if sys.argv[2] == "close":
            await driver.aclose()
        else:
            await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_nothing_survives_a_service(tmp_path: Path, run_dir: Path, end: str) -> None:
    """The pipe ends when the last process that has inherited it exits."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    command = [sys.executable, "-c", SERVICE, HOSTILE.format(fifo=fifo), end]
    with subprocess.Popen(command) as service, fifo.open("rb") as pipe:
        assert pipe.readline() == b"on\n"
        if end == "kill":
            service.kill()
        assert select.select([pipe], [], [], 60)[0]
        assert pipe.read() == b""
    assert len(sweep(run_dir)) == (end == "kill")  # a killed service leaves its directory to the next one


async def test_mounts_are_refused_and_not_ignored(local_driver: LocalDriver, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot mount"):
        await local_driver.start(SandboxSpec(mounts=(Mount(source=tmp_path, target="/testbed"),)))
