"""Times at which the watchdog checks a sandbox."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from prorl_envs.errors import SandboxMemoryLimit
from prorl_envs.sandbox.base import SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.directories import base_problem
from prorl_envs.sandbox.filesystem.disk_usage import DiskUse
from prorl_envs.sandbox.limits.monitor import (
    DESCRIPTORS_IDLE_S,
    MonitoredSandbox,
    SandboxMonitor,
    check_sandbox,
)
from prorl_envs.sandbox.limits.usage import MachineUse, MemoryFiles, node_use, opened_proc
from prorl_envs.sandbox.limits.watchdog import _suspicious, half_way, is_due
from tests.support.sandbox_entry import SCRIPT_TEMPLATES

DUE_S = 10.0


def idle(node: MachineUse, *, memory_left: int | None, processes_left: int | None) -> SandboxMonitor:
    """Return a monitor directly after a check, with these remaining amounts."""
    watch = SandboxMonitor(
        sandbox=cast(MonitoredSandbox, None), limits=SandboxLimits(), group=None, due=DUE_S
    )
    watch.room = half_way(memory_left, processes_left)
    watch.wake = node + watch.room
    return watch


def use(memory: int, tasks: int) -> MachineUse:
    return MachineUse(memory, tasks)


@pytest.mark.parametrize(
    ("uses", "due"),
    [
        ([use(1000, 500), use(1099, 516)], False),
        ([use(1000, 517)], True),
        ([use(1100, 500)], True),
        ([use(1000, 440), use(1000, 456)], False),
        ([use(1000, 440), use(1000, 457)], True),  # the exit of sixty others hides nothing
        ([use(300, 500), use(400, 500)], True),
        ([use(1000, 440), use(1000, 450), use(1000, 457)], True),
    ],
)
def test_an_idle_sandbox_is_checked_once_the_machine_uses_that_much_more(
    uses: list[MachineUse], due: bool
) -> None:
    watch = idle(use(1000, 500), memory_left=200, processes_left=34)
    *before, last = uses
    assert not any(is_due(watch, node, 1.0) for node in before)
    assert is_due(watch, last, 1.0) == due


def test_without_a_limit_only_the_interval_counts() -> None:
    watch = idle(use(1000, 500), memory_left=None, processes_left=None)
    assert not is_due(watch, use(10**12, 10**6), DUE_S - 1)
    assert is_due(watch, use(1000, 500), DUE_S)


def test_a_busy_sandbox_is_checked_at_its_interval() -> None:
    watch = SandboxMonitor(
        sandbox=cast(MonitoredSandbox, None), limits=SandboxLimits(), group=None, due=DUE_S
    )
    assert not is_due(watch, use(10**12, 10**6), DUE_S - 1)
    assert is_due(watch, use(0, 0), DUE_S)


def test_deleted_open_files_trigger_a_measurement() -> None:
    """The measurement does not depend on the memory that others free, or on the duration of the last
    measurement."""
    sandbox = cast(MonitoredSandbox, SimpleNamespace(alive=True, first_pid=1))
    watch = SandboxMonitor(sandbox=sandbox, limits=SandboxLimits(disk_bytes=100), group=None)
    watch.disk_use, watch.measuring_s, watch.tree_use = DiskUse(1000, 10), 60.0, DiskUse(30, 1)
    now = watch.measured + 1.0
    assert not _suspicious(watch, DiskUse(500, 10), now)
    watch.holdings.on_disk = 71
    assert _suspicious(watch, DiskUse(500, 10), now)
    watch.unlinked_bytes = 71  # already judged
    assert not _suspicious(watch, DiskUse(500, 10), now)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory of a tmpfs that holds files of others."""
    if problem := base_problem(Path("/dev/shm")):
        pytest.skip(problem)
    with tempfile.TemporaryDirectory(prefix="prt-", dir="/dev/shm") as place:
        (Path(place) / "of-another").write_bytes(bytes(8 << 20))
        yield Path(place).resolve()


@pytest.mark.anyio
async def test_files_of_others_in_the_same_tmpfs_are_not_the_sandboxs_memory(in_memory: Path) -> None:
    """Many machines have /tmp in memory, so the workspaces of all sandboxes are in memory."""
    driver = BubblewrapDriver(in_memory, templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec())
        first, root = sandbox.first_pid, sandbox.seen_root
        assert first is not None and root is not None
        found = MemoryFiles(first, root)
        assert len(found.devices) >= 2, "its /tmp and /dev/shm"
        assert found.used() < 8 << 20
        (sandbox.workspace / "its-own").write_bytes(bytes(8 << 20))
        assert found.used() < 8 << 20, "a file of the workspace is disk use"
    finally:
        await driver.aclose()


@pytest.mark.anyio
async def test_a_sandbox_whose_memory_no_kill_frees_gets_an_error_of_its_own(run_dir: Path) -> None:
    driver = BubblewrapDriver(run_dir, templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec())
        first, root = sandbox.first_pid, sandbox.seen_root
        assert first is not None and root is not None
        Path(f"/proc/{first}/root/dev/shm/file").write_bytes(bytes(8 << 20))  # noqa: ASYNC240  (in memory)
        with opened_proc(root) as proc:
            watch = SandboxMonitor(sandbox, SandboxLimits(memory_bytes=1 << 20), group=None)
            check_sandbox(watch, first, proc, 1, node_use())
        assert "killing its processes is no help" in watch.why
        assert watch.killed_for is SandboxMemoryLimit
    finally:
        await driver.aclose()


@pytest.mark.anyio
async def test_descriptors_of_an_idle_sandbox_are_checked_again(run_dir: Path) -> None:
    """A process can open descriptors within one tick of processor time, without visible activity."""
    driver = BubblewrapDriver(run_dir, templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec())
        first, root = sandbox.first_pid, sandbox.seen_root
        assert first is not None and root is not None
        with opened_proc(root) as proc:
            watch = SandboxMonitor(sandbox, SandboxLimits(), group=None)
            check_sandbox(watch, first, proc, 1, node_use())
            before = watch.holdings
            assert not watch.descriptors_outdated
            check_sandbox(watch, first, proc, 1, node_use())
            assert watch.holdings is before
            watch.descriptors_due -= DESCRIPTORS_IDLE_S + 1
            check_sandbox(watch, first, proc, 1, node_use())
            assert watch.holdings is not before
    finally:
        await driver.aclose()
