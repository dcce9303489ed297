"""Limits with real bombs. Each bomb is small and stops by itself, so it is always harmless."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError, SandboxLimit
from prorl_envs.sandbox.base import Driver, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.filesystem.directories import sweep
from prorl_envs.sandbox.filesystem.disk_usage import DiskUse
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.limits.enforcement import NodeLimits, rlimits
from prorl_envs.sandbox.limits.watchdog import FAULTS_LIMIT, GIVEN_UP_S, Watchdog
from prorl_envs.sandbox.linux.cgroups import Mechanism, find_groups
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from tests.support.sandbox_entry import LIGHT_TEMPLATES

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]

LIMITS = SandboxLimits(
    memory_bytes=96 << 20, processes=40, open_files=1024, disk_bytes=20 << 20, disk_files=2000
)


def has(groups: Mechanism) -> bool:
    try:
        return find_groups(groups) is not None
    except SandboxError:
        return False


MECHANISMS = [Mechanism.WATCHDOG, *filter(has, (Mechanism.CGROUP2,))]
SPEC = SandboxSpec(limits=LIMITS)


@pytest.fixture(scope="module", params=MECHANISMS)
async def limited(request: pytest.FixtureRequest, run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    driver = BubblewrapDriver(
        limits=NodeLimits(per_sandbox=LIMITS, enforcement=request.param), templates=LIGHT_TEMPLATES
    )
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture(scope="module")
async def watched(run_dir: Path) -> AsyncIterator[BubblewrapDriver]:
    """Driver for tests that do not depend on the mechanism and open no Python session."""
    driver = BubblewrapDriver(limits=NodeLimits(per_sandbox=LIMITS, enforcement=Mechanism.WATCHDOG))
    try:
        await driver.warm("base")
        yield driver
    finally:
        await driver.aclose()


type OpenBox = Callable[..., Awaitable[Toolbox]]


@pytest.fixture
async def open_box() -> AsyncIterator[OpenBox]:
    """Start a sandbox with tools; they are closed with the test."""
    async with AsyncExitStack() as opened:

        async def open_one(driver: Driver, spec: SandboxSpec = SPEC, *, python: bool = False) -> Toolbox:
            sandbox = await driver.start(spec)
            opened.push_async_callback(sandbox.close)
            engine = PythonEngine.FORKED if python else PythonEngine.NONE
            box = await Toolbox.open(sandbox, python=engine)
            opened.push_async_callback(box.aclose)
            return box

        yield open_one


@pytest.fixture
async def box(open_box: OpenBox, limited: BubblewrapDriver) -> AsyncIterator[Toolbox]:
    """Sandbox whose shell must survive the test, beside a sandbox that must not be affected."""
    neighbour, box = await open_box(limited), await open_box(limited)
    templates = {name: template.pid for name, template in limited.templates.items()}
    await neighbour.bash("kept=7; sleep 600 &", timeout_s=10)
    await box.bash("kept=8", timeout_s=10)
    yield box
    assert (await box.bash("echo $kept", timeout_s=20)).text == "8\n"
    assert (await neighbour.bash("echo $kept; jobs -r | wc -l", timeout_s=10)).text == "7\n1\n"
    assert {name: template.pid for name, template in limited.templates.items()} == templates


async def expect_few_processes(box: Toolbox) -> None:
    """Wait until only the first process, the shell, and the counting process run."""
    wait = "until [ $(ls -d /proc/[0-9]* | wc -l) -le 6 ]; do sleep 0.1; done; echo few"
    assert (await box.bash(wait, timeout_s=20)).text.endswith("few\n")


def script(text: str) -> str:
    return f"python3 - <<'EOF'\n{textwrap.dedent(text)}\nEOF\n"


async def test_a_process_that_takes_too_much_memory_is_killed(box: Toolbox) -> None:
    result = await box.bash("python3 -c 'x = bytearray(300 << 20)'; echo status $?", timeout_s=30)
    assert "status 137" in result.text
    assert "[the sandbox's memory limit of 96 MB was reached: " in result.text
    assert result.data["limits"] and "killed" in result.data["limits"][0]
    assert "limit" not in (await box.bash("echo next", timeout_s=10)).text  # reported once


async def test_many_processes_that_together_take_too_much_memory_are_reduced(box: Toolbox) -> None:
    hoard = "python3 -c 'import time; x = bytearray(30 << 20); time.sleep(2)'"
    result = await box.bash(f"for i in 1 2 3 4 5 6; do {hoard} & done; wait; echo waited", timeout_s=60)
    assert "waited" in result.text and "memory limit of 96 MB was reached" in result.text


async def test_memory_within_the_limit_is_left_alone(box: Toolbox) -> None:
    result = await box.bash("python3 -c 'x = bytearray(50 << 20); print(len(x))'", timeout_s=30)
    assert result.text == f"{50 << 20}\n"


async def test_sandboxes_have_a_lower_priority_than_the_service(
    open_box: OpenBox, limited: BubblewrapDriver
) -> None:
    box = await open_box(limited, python=True)
    assert (await box.bash("nice", timeout_s=10)).text == "10\n"
    assert (await box.python("import os; os.getpriority(os.PRIO_PROCESS, 0)", timeout_s=30)).text == "10\n"
    assert os.getpriority(os.PRIO_PROCESS, 0) == 0


async def test_files_in_memory_count_as_memory(box: Toolbox) -> None:
    # No process maps them. The limit of one file would not stop them either: there are several.
    result = await box.bash(
        script("""
            import os, time
            for _ in range(12):
                fd = os.memfd_create("hidden")
                os.write(fd, bytes(15 << 20))
            time.sleep(20)
        """),
        timeout_s=60,
    )
    assert "memory limit of 96 MB was reached" in result.text


async def test_shared_memory_files_cannot_fill_the_limit_alone(box: Toolbox) -> None:
    fill = "for i in 1 2 3 4 5 6; do head -c 15M /dev/zero > /dev/shm/$i; done 2>&1 | head -1"
    assert "No space left" in (await box.bash(fill, timeout_s=30)).text


async def test_more_processes_than_allowed_are_killed(box: Toolbox) -> None:
    # It reaches 255 processes if it is not stopped.
    result = await box.bash(
        script("""
            import os, time
            for _ in range(7):
                try:
                    os.fork()
                except OSError:
                    pass
            time.sleep(20)
        """),
        timeout_s=60,
    )
    assert "limit of 40 processes was reached: all but its shells were killed" in result.text
    await expect_few_processes(box)


async def test_dead_processes_that_are_not_collected_count(box: Toolbox) -> None:
    """The kernel counts them too, so that a sandbox full of them can start no command."""
    result = await box.bash(
        script("""
            import os, time
            for _ in range(36):
                try:
                    if os.fork() == 0:
                        os._exit(0)
                except OSError:
                    pass
            time.sleep(20)
        """),
        timeout_s=60,
    )
    assert "limit of 40 processes was reached: all but its shells were killed" in result.text
    assert "fine" in (await box.bash("/bin/echo fine", timeout_s=60)).text


async def test_processes_detached_from_the_shell_are_found(box: Toolbox) -> None:
    bomb = "(for i in $(seq 60); do setsid sleep 20 & done) > /dev/null 2>&1; sleep 8; echo over"
    await box.bash(bomb, timeout_s=60)
    # The report comes with that call or the next.
    await expect_few_processes(box)


async def test_only_the_process_that_uses_up_descriptors_fails(box: Toolbox) -> None:
    result = await box.bash("python3 -c 'x = [open(\"/dev/null\") for _ in range(2000)]'", timeout_s=30)
    assert "Too many open files" in result.text


async def test_a_flood_of_output_does_no_harm(box: Toolbox) -> None:
    result = await box.bash("yes | head -c 60M", timeout_s=60)
    assert result.truncated_bytes > 50 << 20 and len(result.text) < 40_000


async def test_a_python_session_that_takes_too_much_memory_is_killed(
    open_box: OpenBox, limited: BubblewrapDriver
) -> None:
    mounts, masks, env = python_runtime()
    spec = SandboxSpec(mounts=mounts, masks=masks, env=env, limits=SandboxLimits(memory_bytes=256 << 20))
    box = await open_box(limited, spec, python=True)
    hold = "import time; x = bytearray(700 << 20); time.sleep(30)"  # or a check could miss it
    result = await box.python(hold, timeout_s=60)
    assert not result.ok and "memory limit of 256 MB was reached" in result.text
    assert "the next cell gets a new one" in result.text
    assert (await box.python("print(6 * 7)", timeout_s=30)).text == "42\n"


async def test_a_file_stops_growing_at_the_limit(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched)
    result = await box.bash("kept=8; head -c 60M /dev/zero > file; stat -c %s file", timeout_s=30)
    assert str(20 << 20) in result.text and "File size limit exceeded" in result.text
    assert (await box.bash("echo $kept", timeout_s=10)).text == "8\n"


WRITER = """
    import time
    for number in range(50):
        with open(f"file{number}", "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(0.2 if number < 20 else 2)  # a busy machine notices before it is far exceeded
"""


async def test_a_command_that_fills_the_disk_is_killed_and_files_can_be_removed(
    open_box: OpenBox,
    watched: BubblewrapDriver,
) -> None:
    box = await open_box(watched)
    result = await box.bash("kept=8\n" + script(WRITER), timeout_s=60)
    assert "[the sandbox's disk limit of 20 MB was reached: its running commands were killed" in result.text
    assert (await box.bash("rm file*; echo $kept", timeout_s=10)).text == "8\n"
    assert (await box.bash("head -c 5M /dev/zero > file; sleep 1; ls", timeout_s=10)).text == "file\n"


async def test_a_shell_that_fills_the_disk_itself_is_killed(
    open_box: OpenBox, watched: BubblewrapDriver
) -> None:
    box = await open_box(watched)
    line = "x" * 65536
    inner = f"for j in {{1..16}}; do echo {line}; done > f$i; read -t 0.3 -u 9"
    write = f"mkfifo never; exec 9<>never; for i in {{1..200}}; do {inner}; done"
    result = await box.bash(write, timeout_s=60)
    assert "disk limit of 20 MB was reached" in result.text
    assert "the shell was killed by signal 9" in result.text
    assert (await box.bash("rm f*; echo here", timeout_s=10)).text == "here\n"


async def test_small_files_count_even_when_empty(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched)
    result = await box.bash("for i in {1..3500}; do : > f$i; done; sleep 20", timeout_s=60)
    assert "[the sandbox's limit of 2000 files was reached" in result.text


async def test_unreadable_directories_hide_nothing(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched)
    hide = "mkdir d$i; head -c 1M /dev/zero > d$i/x; chmod 0 d$i; sleep 0.2"
    result = await box.bash(f"for i in {{1..50}}; do {hide}; done", timeout_s=60)
    assert "disk limit of 20 MB was reached" in result.text


async def test_removed_files_count_while_they_are_open(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched)
    result = await box.bash(
        script("""
            import os, time
            kept = []
            for number in range(50):
                kept.append(open("file", "wb"))
                os.unlink("file")
                kept[-1].write(bytes(1 << 20))
                kept[-1].flush()
                time.sleep(0.2)
            time.sleep(20)
        """),
        timeout_s=60,
    )
    assert "disk limit of 20 MB was reached" in result.text


async def test_a_sparse_file_counts_by_its_blocks(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched)
    result = await box.bash("for i in 1 2 3; do truncate -s 19M f$i; done; sleep 1; echo fine", timeout_s=30)
    assert result.text == "fine\n"


async def test_a_sandbox_far_over_its_disk_limit_is_killed(
    open_box: OpenBox, watched: BubblewrapDriver
) -> None:
    box = await open_box(watched)
    burst = script("""
        import os, time
        for number in range(5):
            os.posix_fallocate(os.open(f"f{number}", os.O_CREAT | os.O_RDWR), 0, 19 << 20)
        time.sleep(20)
    """)
    with pytest.raises(SandboxLimit, match=r"disk limit of 20 MB was reached and far exceeded") as caught:
        await box.bash(burst, timeout_s=60)
    assert not caught.value.retryable
    with pytest.raises(SandboxLimit, match="far exceeded"):
        await box.bash("echo hello", timeout_s=10)


async def test_a_sandbox_over_its_lifetime_is_killed(open_box: OpenBox, watched: BubblewrapDriver) -> None:
    box = await open_box(watched, SandboxSpec(limits=SandboxLimits(lifetime_s=1.0)))
    with pytest.raises(SandboxLimit, match="was ended: it reached its lifetime of 1 s"):
        await box.bash("sleep 60", timeout_s=90)
    with pytest.raises(SandboxLimit, match="lifetime of 1 s"):
        await box.sandbox.spawn("prorl_envs.tools.server.server:serve")
    await box.sandbox.close()
    assert box.sandbox not in watched.sandboxes


async def test_on_a_full_disk_the_largest_sandbox_is_killed(open_box: OpenBox, run_dir: Path) -> None:
    status = os.statvfs(run_dir)
    more_than_there_is = status.f_blocks * status.f_frsize
    driver = BubblewrapDriver(limits=NodeLimits(reserve_bytes=more_than_there_is))
    small, large = await open_box(driver, SandboxSpec()), await open_box(driver, SandboxSpec())
    with pytest.raises(SandboxLimit, match="disk is nearly full"):
        await large.bash("head -c 80M /dev/urandom > file; sleep 60", timeout_s=90)
    assert (await small.bash("echo here", timeout_s=10)).text == "here\n"
    await driver.aclose()


async def test_without_limits_nothing_is_checked(open_box: OpenBox, run_dir: Path) -> None:
    free = SandboxLimits(memory_bytes=None, processes=None, disk_bytes=None, disk_files=None)
    driver = BubblewrapDriver(limits=NodeLimits(per_sandbox=free, reserve_bytes=0))
    before = set(threading.enumerate())
    box = await open_box(driver, SandboxSpec())
    assert (await box.bash("head -c 30M /dev/zero > f; sleep 0.5; echo fine", timeout_s=30)).text == "fine\n"
    started = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("watchdog") for name in started)
    await driver.aclose()


async def test_the_local_driver_enforces_limits_of_single_processes(open_box: OpenBox, run_dir: Path) -> None:
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver(
            limits=NodeLimits(per_sandbox=replace(LIMITS, disk_bytes=None, file_bytes=20 << 20))
        )
    box = await open_box(driver, SandboxSpec())
    result = await box.bash("head -c 60M /dev/zero > file; stat -c %s file; ulimit -n", timeout_s=30)
    assert str(20 << 20) in result.text and result.text.endswith("1024\n")
    await driver.aclose()


async def test_the_nice_level_of_sandboxes_can_be_set(open_box: OpenBox, run_dir: Path) -> None:
    driver = BubblewrapDriver(limits=NodeLimits(nice=3, enforcement=Mechanism.WATCHDOG))
    try:
        assert (await (await open_box(driver)).bash("nice", timeout_s=10)).text == "3\n"
    finally:
        await driver.aclose()


@pytest.mark.parametrize(
    "limits",
    [
        SandboxLimits(memory_bytes=1 << 20),
        SandboxLimits(processes=3),
        SandboxLimits(open_files=64),
        SandboxLimits(disk_bytes=0),
    ],
    ids=repr,
)
async def test_limits_that_are_too_small_are_refused(
    watched: BubblewrapDriver, limits: SandboxLimits
) -> None:
    with pytest.raises(SandboxError, match="not a usable limit"):
        await watched.start(SandboxSpec(limits=limits))


def test_the_largest_file_is_the_disk_limit_by_default() -> None:
    import resource

    def file_size(limits: SandboxLimits) -> int | None:
        found = {kind: hard for kind, _, hard in rlimits(limits, isolated=True)}
        return found.get(resource.RLIMIT_FSIZE)

    assert file_size(SandboxLimits(disk_bytes=5 << 20)) == 5 << 20
    assert file_size(SandboxLimits(disk_bytes=5 << 20, file_bytes=2 << 20)) == 2 << 20
    assert file_size(SandboxLimits(disk_bytes=None)) is None


SERVICE = """
    import asyncio, sys, time
    from prorl_envs.sandbox.base import SandboxSpec
    from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
    from prorl_envs.sandbox.linux.cgroups import Mechanism
    from prorl_envs.sandbox.limits.enforcement import NodeLimits

    async def main():
        driver = BubblewrapDriver(limits=NodeLimits(enforcement=Mechanism(sys.argv[1])))
        sandbox = await driver.start(SandboxSpec())
        print(driver.directory.path, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.fixture
def abandoned_groups(run_dir: Path) -> Iterator[tuple[list[Path], Path]]:
    """Groups and driver directory of a service that was killed."""
    if not has(Mechanism.CGROUP2):
        pytest.skip("this machine delegates no control groups")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVICE), Mechanism.CGROUP2], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    record = json.loads((directory / "groups").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    name = f"prorl-{record['driver']}-*"
    groups = list(Path(record["place"]).glob(name))
    yield groups, directory
    for left in groups:  # only if the test has failed
        if left.exists():
            left.rmdir()


def test_the_groups_of_a_killed_service_are_removed_with_its_directory(
    abandoned_groups: tuple[list[Path], Path], run_dir: Path
) -> None:
    groups, directory = abandoned_groups
    assert groups
    assert directory in sweep(run_dir)
    assert not any(group.exists() for group in groups)


async def test_a_driver_names_the_limits_it_enforces(run_dir: Path, watched: BubblewrapDriver) -> None:
    assert watched.enforced_limits >= {"memory_bytes", "processes", "disk_bytes", "disk_files", "lifetime_s"}
    assert "cpus" not in watched.enforced_limits
    with pytest.warns(NoIsolationWarning):
        local = LocalDriver()
    assert "disk_bytes" in local.enforced_limits
    assert not local.enforced_limits & {"memory_bytes", "processes", "cpus"}
    await local.aclose()


class Impossible:
    """Sandbox whose check fails with an unexpected error."""

    id = "impossible"
    alive = True
    seen_root = "/proc/1/root"
    servers_inside: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.why: SandboxError | None = None
        self.ended = asyncio.Event()

    @property
    def first_pid(self) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("a fault of ours")
        return 1

    async def measure_disk(self, *, size: int, files: int) -> DiskUse:
        return DiskUse(0, 0)

    def end(self, why: SandboxError) -> None:
        self.why, self.alive = why, False
        self.ended.set()


async def test_a_failing_check_kills_its_sandbox_and_the_watchdog_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(tmp_path, 0)
    try:
        one, other = Impossible(), Impossible()
        for sandbox in (one, other):
            watchdog.add(sandbox, LIMITS, None)
            await sandbox.ended.wait()
            assert "can no longer be enforced" in str(sandbox.why) and not isinstance(
                sandbox.why, SandboxLimit
            )
        watchdog.check()
    finally:
        await watchdog.aclose()
    assert [record.levelname for record in caplog.records].count("CRITICAL") == 2


class Unreadable(Impossible):
    """A sandbox that runs, with a /proc that cannot be opened."""

    seen_root = "/nonexistent"
    first_pid = 1


async def test_a_running_sandbox_whose_processes_cannot_be_read_is_closed(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 0)
    try:
        watchdog.add(sandbox := Unreadable(), LIMITS, None)
        await sandbox.ended.wait()
    finally:
        await watchdog.aclose()
    assert "limits can no longer be enforced: [Errno 2]" in str(sandbox.why)
    assert not isinstance(sandbox.why, SandboxLimit)


async def test_no_sandbox_runs_once_limits_are_no_longer_enforced(open_box: OpenBox, run_dir: Path) -> None:
    driver = BubblewrapDriver(limits=NodeLimits(per_sandbox=LIMITS, enforcement=Mechanism.WATCHDOG))
    try:
        box = await open_box(driver)
        for _ in range(FAULTS_LIMIT):
            driver.limit_enforcer._watchdog.add(impossible := Impossible(), LIMITS, None)
            await impossible.ended.wait()
        with pytest.raises(SandboxError, match="limits can no longer be enforced") as caught:
            await box.bash("echo hello", timeout_s=10)
        assert not isinstance(caught.value, SandboxLimit)
        watchdog = driver.limit_enforcer._watchdog
        with pytest.raises(SandboxError, match=r"the watchdog that enforces their limits has failed: .+"):
            await driver.start(SPEC)
        await box.sandbox.close()
        assert watchdog._given_up is not None
        watchdog._given_up = watchdog._given_up[0] - GIVEN_UP_S, watchdog._given_up[1]
        again = await open_box(driver)
        assert (await again.bash("echo again", timeout_s=10)).text == "again\n"
        assert watchdog._task is not None and not watchdog._task.done()
        await again.sandbox.close()
        assert not driver.sandboxes
    finally:
        await driver.aclose()
