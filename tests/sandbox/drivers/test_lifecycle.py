"""Start and close of sandboxes, and failures in between. The leak fixture checks each test."""

import asyncio
import itertools
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Driver, Mount, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver, BubblewrapSandbox
from prorl_envs.sandbox.drivers.probe import find_bwrap
from prorl_envs.sandbox.drivers.select import DRIVERS, make_driver
from tests.conftest import existing_driver
from tests.places import drivers_directory
from tests.support.leaks import OpenResources, leaks_since
from tests.support.sandbox_entry import FAIL, RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

pytestmark = pytest.mark.anyio
#: Tests of `any_driver`: one of the drivers warns.
ANY_DRIVER = pytest.mark.filterwarnings("ignore::prorl_envs.sandbox.drivers.local.NoIsolationWarning")


@pytest.fixture(scope="module", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory in memory: many tests have their own driver."""
    yield from drivers_directory(in_memory=True)


@pytest.fixture(params=[name for name in DRIVERS if name != "auto"])
async def any_driver(run_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[NodeDriver[Any]]:
    """Driver of each kind for a single test."""
    driver = make_driver(existing_driver(request.param), templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


@ANY_DRIVER
async def test_the_driver_and_its_sandboxes_keep_the_contract(any_driver: NodeDriver[Any]) -> None:
    assert isinstance(any_driver, Driver)
    spec = SandboxSpec(env={"A": "b"})
    first, second = await asyncio.gather(any_driver.start(spec), any_driver.start(spec))
    assert isinstance(first, Sandbox)
    assert first.alive and second.alive
    assert first.id != second.id
    assert first.spec.limits is not None
    assert replace(first.spec, limits=None) == spec
    await first.close()
    assert not first.alive and second.alive


@ANY_DRIVER
async def test_closing_is_idempotent_and_concurrent(any_driver: NodeDriver[Any]) -> None:
    sandbox = await any_driver.start(SandboxSpec())
    await asyncio.gather(*(sandbox.close() for _ in range(5)))
    await sandbox.close()
    assert not sandbox.workspace.exists()
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.spawn(RUN_SCRIPTS)


async def test_a_sandbox_with_a_tool_server_takes_four_descriptors(shell_driver: BubblewrapDriver) -> None:
    async def descriptors_with(count: int) -> int:
        sandboxes = [await shell_driver.start(SandboxSpec()) for _ in range(count)]
        socks = [await sandbox.spawn(RUN_SCRIPTS) for sandbox in sandboxes]
        found = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for sock, sandbox in zip(socks, sandboxes, strict=True):
            sock.close()
            await sandbox.close()
        return found

    first = await descriptors_with(1)
    assert await descriptors_with(3) == first + 2 * 4


@ANY_DRIVER
async def test_closing_continues_when_the_caller_is_cancelled(any_driver: NodeDriver[Any]) -> None:
    sandbox = await any_driver.start(SandboxSpec())
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await sandbox.close()
    assert not sandbox.workspace.exists()


async def test_closing_kills_busy_and_detached_processes(shell_driver: BubblewrapDriver) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        await ask(sock, "(setsid sleep 600 > /dev/null 2>&1 &); (nohup sleep 600 > /dev/null 2>&1 &)")
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"sleep 600\n")
        await sandbox.close()
        with pytest.raises(EOFError):
            await ask(sock, "true")


@ANY_DRIVER
async def test_closing_the_driver_closes_everything(any_driver: NodeDriver[Any]) -> None:
    sandboxes = [await any_driver.start(SandboxSpec()) for _ in range(3)]
    socks = [await sandbox.spawn(RUN_SCRIPTS) for sandbox in sandboxes]
    await any_driver.aclose()
    await any_driver.aclose()
    assert not any(sandbox.alive for sandbox in sandboxes)
    for sock in socks:
        sock.close()
    with pytest.raises(SandboxError, match="closed"):
        await any_driver.start(SandboxSpec())


async def test_closing_the_driver_cancels_starts(own_driver: BubblewrapDriver) -> None:
    starts = [asyncio.create_task(own_driver.start(SandboxSpec())) for _ in range(4)]
    await own_driver.start(SandboxSpec())
    await own_driver.aclose()
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, SandboxError) or (
            isinstance(outcome, BubblewrapSandbox) and not outcome.alive
        )


async def test_many_sandboxes_at_once(shell_driver: BubblewrapDriver) -> None:
    async def one(number: int) -> str:
        sandbox = await shell_driver.start(SandboxSpec(env={"NUMBER": str(number)}))
        try:
            return await run_script(sandbox, "echo $NUMBER > file; cat file")
        finally:
            await sandbox.close()

    assert await asyncio.gather(*map(one, range(32))) == [f"{number}\n" for number in range(32)]


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 4, 6, 8, 12, 30, 60, 90])
async def test_a_start_cancelled_at_any_moment_leaks_nothing(
    shell_driver: BubblewrapDriver, delay_ms: int
) -> None:
    """A start that completes before the cancellation yields a sandbox, which is closed."""
    before = set(shell_driver.sandboxes)
    start = asyncio.create_task(shell_driver.start(SandboxSpec(default_route=True)))
    await asyncio.wait([start], timeout=delay_ms / 1000)
    start.cancel()
    (outcome,) = await asyncio.gather(start, return_exceptions=True)
    if not isinstance(outcome, asyncio.CancelledError):
        assert not isinstance(outcome, BaseException)
        await outcome.close()
    assert set(shell_driver.sandboxes) == before


@pytest.mark.parametrize("delay_ms", [0, 1, 2, 3, 5])
async def test_a_spawn_cancelled_at_any_moment_leaks_nothing(
    shell_driver: BubblewrapDriver, delay_ms: int
) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    spawn = asyncio.create_task(sandbox.spawn(RUN_SCRIPTS))
    await asyncio.wait([spawn], timeout=delay_ms / 1000)
    spawn.cancel()
    (outcome,) = await asyncio.gather(spawn, return_exceptions=True)
    if not isinstance(outcome, BaseException):
        outcome.close()
    await sandbox.close()


@ANY_DRIVER
async def test_a_failed_start_leaks_nothing_and_the_next_one_works(
    any_driver: NodeDriver[Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no image")
    for spec in (
        SandboxSpec(mounts=(Mount(source=tmp_path / "absent", target="/x"),)),
        SandboxSpec(image=tmp_path / "absent.sif"),
        SandboxSpec(image=tmp_path / "file"),
    ):
        with pytest.raises(SandboxError) as caught:
            await any_driver.start(spec)
        assert caught.value.message
        assert spec.image is None or spec.image.name in str(caught.value)
    assert not any_driver.sandboxes
    sandbox = await any_driver.start(SandboxSpec())
    assert await run_script(sandbox, "echo works") == "works\n"
    await sandbox.close()


async def test_a_sandbox_that_exits_by_itself_is_reported_as_ended(shell_driver: BubblewrapDriver) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        first = os.pidfd_open(sandbox.pid)
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            for _ in itertools.count():  # the tool server outlives the namespace until it next forks
                await ask(sock, "true")
    select.select([first], [], [])  # it has ended once all processes in it have
    os.close(first)
    assert not sandbox.alive
    with pytest.raises(SandboxError, match="ended"):
        await sandbox.spawn(RUN_SCRIPTS)
    await sandbox.close()


async def test_a_lost_tool_server_is_noticed_and_another_can_be_forked(
    shell_driver: BubblewrapDriver,
) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        await ask(sock, "echo kept > file")
        (server,) = sandbox.tool_servers
        os.kill(server, signal.SIGKILL)
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
    assert await run_script(sandbox, "cat file") == "kept\n"
    await sandbox.close()


async def test_no_process_of_the_same_user_can_inspect_the_tool_server(
    shell_driver: BubblewrapDriver,
) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS):
        (server,) = sandbox.tool_servers
        process = Path("/proc", str(server))
        assert (process / "environ").owner() == "root"  # not dumpable: its files are not this user's
        status = (process / "status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "CapBnd:\t0000000000000000" in status
    await sandbox.close()


async def test_a_failing_entry_closes_the_socket_and_is_logged(
    shell_driver: BubblewrapDriver, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await shell_driver.start(SandboxSpec())
    with caplog.at_level(logging.WARNING), await sandbox.spawn(FAIL) as sock:
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        await sandbox.close()
    assert f"tool server of sandbox {sandbox.id} failed: Traceback" in caplog.text
    assert "RuntimeError: the tool server has a fault" in caplog.text


@pytest.mark.parametrize(
    ("entry", "template", "word"),
    [("os:abort", "base", "no entry"), (RUN_SCRIPTS, "absent", "no template")],
)
@ANY_DRIVER
async def test_an_unlisted_entry_cannot_be_spawned(
    any_driver: NodeDriver[Any], entry: str, template: str, word: str
) -> None:
    sandbox = await any_driver.start(SandboxSpec())
    with pytest.raises(SandboxError, match=word):
        await sandbox.spawn(entry, template=template)
    await sandbox.close()


async def test_a_dead_template_is_replaced_and_sandboxes_survive(own_driver: BubblewrapDriver) -> None:
    sandbox = await own_driver.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        template = own_driver.templates["base"].pid
        assert template is not None
        os.kill(template, signal.SIGKILL)
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""  # its forks exit with it
    assert sandbox.alive
    assert await run_script(sandbox, "echo again") == "again\n"
    assert own_driver.templates["base"].pid != template
    await sandbox.close()


async def test_concurrent_first_spawns_share_one_template(own_driver: BubblewrapDriver) -> None:
    sandbox = await own_driver.start(SandboxSpec())
    answers = await asyncio.gather(*(run_script(sandbox, "echo $PPID") for _ in range(4)))
    assert answers == ["0\n"] * 4  # the parent is outside
    await sandbox.close()


SERVICE = """\
import asyncio, signal, sys
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver
from tests.support.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

async def main():
    driver = make_driver(sys.argv[1], templates=SCRIPT_TEMPLATES)
    try:
        print("driver", flush=True)
        sandbox = await driver.start(SandboxSpec(default_route=True))
        print("sandbox", flush=True)
        sock = await sandbox.spawn(RUN_SCRIPTS)
        print("tool", flush=True)
        await ask(sock, "(setsid sleep 600 > /dev/null 2>&1 &)")
        print("busy", flush=True)
        await ask(sock, "sleep 600")
    finally:
        await driver.aclose()

asyncio.run(main())
"""


FORKING = """\
import asyncio, os, signal, sys
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver
from tests.support.sandbox_entry import SCRIPT_TEMPLATES

async def main():
    driver = make_driver(sys.argv[1], templates=SCRIPT_TEMPLATES)
    await driver.warm()
    sandbox = await driver.start(SandboxSpec())
    worker = os.fork()
    if worker == 0:
        signal.pause()
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def wait_for_processes(before: OpenResources, run_dir: Path) -> set[tuple[int, int]]:
    """Wait up to 30 seconds for the exit of all processes started since `before`; return those that still
    run."""
    deadline = time.monotonic() + 30
    while left := OpenResources.now(run_dir).processes.keys() - before.processes.keys():
        if time.monotonic() > deadline:
            return left
        select.select([], [], [], 0.01)
    return set()


def test_a_forked_worker_does_not_keep_a_killed_services_sandboxes(run_dir: Path, driver_name: str) -> None:
    before = OpenResources.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING, driver_name], stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        worker = os.pidfd_open(int(service.stdout.readline()))
    try:
        # The worker itself is not counted: it is no child of this process and in no sandbox.
        kept = wait_for_processes(before, run_dir)
    finally:
        signal.pidfd_send_signal(worker, signal.SIGKILL)  # an orphan by now, waiting for a signal
        select.select([worker], [], [])
        os.close(worker)
    assert not kept
    asyncio.run(BubblewrapDriver().aclose())


def interrupted_service(driver_name: str, moment: str, number: signal.Signals) -> None:
    """Start a service in its own process group, as in a terminal; signal the group at `moment`."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE, driver_name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    ) as service:
        assert service.stdout is not None
        for line in service.stdout:
            if line.strip() == moment:
                os.killpg(service.pid, number)
                break
        service.stdout.read()


@pytest.mark.parametrize("moment", ["driver", "sandbox", "tool", "busy"])
def test_an_interrupt_at_any_moment_leaks_nothing(driver_name: str, moment: str) -> None:
    interrupted_service(driver_name, moment, signal.SIGINT)


@pytest.mark.parametrize("moment", ["driver", "sandbox", "tool", "busy"])
def test_a_killed_service_leaks_no_process_and_its_files_are_removed(
    driver_name: str, moment: str, run_dir: Path
) -> None:
    before = OpenResources.now(run_dir)
    interrupted_service(driver_name, moment, signal.SIGKILL)
    assert set(run_dir.iterdir()) - set(map(Path, before.directories))
    asyncio.run(BubblewrapDriver().aclose())  # the next driver removes them
    assert leaks_since(before, run_dir) == []


STARTING = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver

asyncio.run(BubblewrapDriver(bwrap=Path(sys.argv[1])).start(SandboxSpec()))
"""


@pytest.mark.parametrize(
    ("whom", "ends"),
    # A starter that dies before it has sent bubblewrap's pid to the service fails the start, later not.
    [("$(cut -d' ' -f4 /proc/$PPID/stat)", {-signal.SIGKILL}), ("$PPID", {0, 1})],
    ids=["service", "starter"],
)
def test_a_service_or_starter_killed_while_bubblewrap_starts_leaks_no_process(
    run_dir: Path, tmp_path: Path, whom: str, ends: set[int]
) -> None:
    before = OpenResources.now(run_dir)
    program = tmp_path / "bwrap"
    # Its report about the namespaces may have no reader any more.
    program.write_text(f'#!/bin/sh\nkill -KILL {whom}; sleep 0.3; exec {find_bwrap(None)} "$@"\n')
    program.chmod(0o755)
    service = subprocess.run([sys.executable, "-c", STARTING, program], check=False)
    assert service.returncode in ends
    assert not wait_for_processes(before, run_dir)
    asyncio.run(BubblewrapDriver().aclose())
    assert leaks_since(before, run_dir) == []
