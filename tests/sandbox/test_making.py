"""The namespaces driver: start of a sandbox, and its own features. The conformance suite covers the rest."""

import asyncio
import contextlib
import os
import pkgutil
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, OpenedTerminal, SandboxSpec, TerminalPlan
from prorl_envs.sandbox.drivers.namespaces import SHELL, NamespaceDriver, NamespaceSandbox
from prorl_envs.sandbox.filesystem.mount_plan import default_environment
from prorl_envs.sandbox.launcher.elf import ANY, FAIL, Call, Label, Step, in_memory, program, spawn
from prorl_envs.sandbox.launcher.launcher import (
    _KNOWN,
    ENDING_SIZE,
    LaunchPlan,
    LaunchProgram,
    LaunchProgramCache,
    steps,
    why_refused,
)
from prorl_envs.sandbox.launcher.writer import GO
from prorl_envs.sandbox.limits.enforcement import NodeLimits
from prorl_envs.sandbox.linux.cgroups import Mechanism, find_groups
from prorl_envs.sandbox.linux.pidfd import readable, receive
from prorl_envs.testing.leaks import OpenResources, leaks_since
from prorl_envs.testing.sandbox_entry import SCRIPT_TEMPLATES, run_script
from tests.places import drivers_directory
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_busybox_rootfs, write_rootfs

pytestmark = pytest.mark.anyio

KILOBYTES = 100
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
#: Descriptors of a maker, and of a shell.
MAKER = {0: "/dev/null", 1: "/dev/null", 2: "/dev/null", 3: "socket:"}
SHELL_FDS = {0, 1, 2, 40, 41}


@pytest.fixture(scope="module", autouse=True)
def run_dir() -> Iterator[Path]:
    """Directory in memory: many tests have their own driver."""
    yield from drivers_directory(in_memory=True)


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[NamespaceDriver]:
    driver = NamespaceDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


@pytest.fixture
async def busybox_image(tmp_path: Path, busybox: str) -> Path:
    return write_busybox_rootfs(tmp_path / "busybox", busybox)


async def start(driver: NamespaceDriver, spec: SandboxSpec | None = None) -> NamespaceSandbox:
    sandbox = await driver.start(spec or SandboxSpec())
    assert isinstance(sandbox, NamespaceSandbox)
    return sandbox


def maker_pid(sandbox: NamespaceSandbox) -> int:
    assert sandbox._maker is not None
    return sandbox._maker.pid


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def descriptors(pid: int) -> dict[int, str]:
    folder = Path(f"/proc/{pid}/fd")
    try:
        return {int(entry.name): str(entry.readlink()).partition("[")[0] for entry in folder.iterdir()}
    except PermissionError:
        pytest.skip("only root may look into a process that is not dumpable")


#: Prints whether an ordinary user may look into a process.
LOOK = """\
import os, sys
from prorl_envs.sandbox.linux.syscalls import drop_capabilities
if os.geteuid() == 0:
    drop_capabilities()
try:
    print(os.readlink(f"/proc/{sys.argv[1]}/exe"))
except PermissionError:
    print("refused")
"""


def seen_by_user(pid: int) -> str:
    command = [sys.executable, "-c", LOOK, str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# The processes of a sandbox


async def test_the_first_process_reveals_nothing(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    script = (
        "tr '\\0' ' ' < /proc/1/cmdline; echo; cat /proc/1/status; "
        "for secret in exe cwd root fd/0 ns/user; do readlink /proc/1/$secret; done; "
        "for secret in environ maps mem; do head -c 1 /proc/1/$secret 2>/dev/null; done"
    )
    line, _, said = (await run_script(sandbox, script)).partition("\n")
    assert line == "sandbox "
    assert "NoNewPrivs:\t1" in said
    assert said.splitlines()[-1].startswith("nonvoluntary_ctxt_switches"), "and nothing that is secret"
    assert int(said.partition("VmRSS:")[2].split()[0]) < KILOBYTES
    await sandbox.close()


async def test_orphans_are_reaped(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    script = "for i in 1 2 3; do setsid sh -c 'sleep 0.05 & :' & done; wait; sleep 0.5; cat /proc/[0-9]*/stat"
    processes = (await run_script(sandbox, script)).splitlines()
    assert processes
    assert not [line for line in processes if line.rpartition(") ")[2].startswith("Z")]
    await sandbox.close()


async def test_the_maker_is_small_and_unprivileged(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    maker = maker_pid(sandbox)
    found = status(maker)
    assert int(found["VmRSS"].split()[0]) < KILOBYTES
    assert {int(found[name], 16) for name in CAPABILITIES} == {0}
    assert (found["NoNewPrivs"], found["Seccomp"], found["Threads"]) == ("1", "2", "1")
    assert seen_by_user(maker) == "refused"
    assert "sandbox" in seen_by_user(sandbox.pid), "the first process is dumpable, for the host's user"
    assert (await run_script(sandbox, "cat /proc/[0-9]*/stat")).count("(sandbox)") == 1, "it is not inside"
    await sandbox.close()


async def test_the_maker_has_only_the_descriptors_it_needs(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    maker = maker_pid(sandbox)
    await until(lambda: descriptors(maker) == MAKER)
    await until(lambda: descriptors(sandbox.pid) == dict.fromkeys(range(3), "socket:"))
    begun = await sandbox.open_shell()
    assert begun is not None
    await until(lambda: descriptors(maker) == MAKER)
    assert status(maker)["VmRSS"]
    close(begun)
    await sandbox.close()


async def test_the_maker_exits_with_its_sandbox_and_not_before(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    maker = os.pidfd_open(maker_pid(sandbox))
    assert not ended(maker)
    await sandbox.close()
    assert ended(maker)
    os.close(maker)


async def test_a_sandbox_survives_without_its_maker(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    assert sandbox._maker is not None
    sandbox._maker.kill()
    await sandbox._maker.wait()
    assert await run_script(sandbox, "echo here") == "here\n"
    assert await sandbox.open_shell() is None
    await sandbox.close()


# Programs


def alike(driver: NamespaceDriver, *sandboxes: NamespaceSandbox) -> bool:
    return len({driver.programs.get(sandbox._making()) for sandbox in sandboxes}) == 1


@pytest.mark.parametrize("hostname", ["", "other"])
async def test_equal_sandboxes_share_a_program_and_no_directories(
    driver: NamespaceDriver, hostname: str, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    overlay = Mount(source=tmp_path / "shared", target="/over", overlay=True)
    spec = SandboxSpec(mounts=(overlay,))
    if hostname:
        spec = replace(spec, hostname=hostname)
    first, second = await start(driver, spec), await start(driver, spec)
    assert alike(driver, first, second)
    everywhere = "/workspace /tmp /home/agent /over"
    for sandbox in (first, second):
        script = f"ls {everywhere} | grep x; for f in {everywhere}; do echo {sandbox.id} > $f/x; done"
        assert await run_script(sandbox, script) == ""
    assert await run_script(first, "cat /workspace/x /tmp/x /home/agent/x /over/x") == f"{first.id}\n" * 4
    assert (first.workspace / "x").read_text() == f"{first.id}\n"
    assert (second.workspace / "x").read_text() == f"{second.id}\n"
    await first.close()
    third = await start(driver, spec)
    assert alike(driver, second, third)
    assert await run_script(third, f"ls {everywhere} | grep x; hostname") == f"{spec.hostname}\n"
    await third.close()
    await second.close()


async def test_different_sandboxes_have_their_own_programs(driver: NamespaceDriver, tmp_path: Path) -> None:
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
    sandboxes = [await start(driver, spec) for spec in specs]
    assert len({driver.programs.get(sandbox._making()) for sandbox in sandboxes}) == len(specs)
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


async def test_a_source_may_be_a_directory_and_later_a_file(driver: NamespaceDriver, tmp_path: Path) -> None:
    source = tmp_path / "source"
    spec = SandboxSpec(mounts=(Mount(source=source, target="/made/here"),))
    for _ in range(2):
        source.mkdir()
        (source / "file").write_text("in a directory")
        sandbox = await start(driver, spec)
        assert await run_script(sandbox, "cat /made/here/file") == "in a directory"
        await sandbox.close()
        shutil.rmtree(source)
        source.write_text("a file")
        sandbox = await start(driver, spec)
        assert await run_script(sandbox, "cat /made/here") == "a file"
        await sandbox.close()
        source.unlink()


async def test_a_source_is_the_current_one_at_its_path(driver: NamespaceDriver, tmp_path: Path) -> None:
    source, target = (
        tmp_path / "source",
        SandboxSpec(mounts=(Mount(source=tmp_path / "source", target="/x"),)),
    )
    for content in ("one", "two"):
        source.mkdir()
        (source / "file").write_text(content)
        sandbox = await start(driver, target)
        assert await run_script(sandbox, "cat /x/file") == content
        await sandbox.close()
        shutil.rmtree(source)


def in_memories() -> int:
    """Descriptors of programs that this process holds."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            found += "memfd:sandbox" in str(entry.readlink())
    return found


def small(hostname: str) -> LaunchPlan:
    return LaunchPlan(
        mounts=("--proc", "/proc"),
        files=frozenset(),
        own="/proc/",
        workdir="/",
        uid=1,
        hostname=hostname,
        network=True,
        rlimits=(),
        trial=(),
        shell=None,
    )


def test_unused_programs_are_evicted_one_by_one_and_closed() -> None:
    before = in_memories()
    programs = LaunchProgramCache()
    kept = programs.get(small("kept"))
    for number in range(_KNOWN - 1):
        programs.get(small(f"other{number}"))
    assert in_memories() - before == _KNOWN
    assert programs.get(small("kept")) is kept, "wanted last, so that another is forgotten"
    programs.get(small("one more"))
    assert programs.get(small("kept")) is kept
    assert in_memories() - before == _KNOWN
    held = programs.get(small("other1"))
    for number in range(_KNOWN):
        programs.get(small(f"new{number}"))
    assert in_memories() - before == _KNOWN + 2, "those that somebody has are open"
    assert programs.get(small("kept")) is not kept
    del kept, held
    assert in_memories() - before == _KNOWN
    del programs
    assert in_memories() == before


def test_programs_depend_on_every_part_of_the_spec() -> None:
    """A program of another spec would give a sandbox the wrong network, user or limits."""
    programs = LaunchProgramCache()
    first = small("same")
    others = [
        replace(first, network=not first.network),
        replace(first, uid=first.uid + 1),
        replace(first, workdir="/elsewhere"),
        replace(first, rlimits=((resource.RLIMIT_NOFILE, 64, 64),)),
        replace(first, hostname="other"),
    ]
    found = [programs.get(making) for making in (first, *others)]
    assert len({id(program) for program in found}) == len(found)
    assert [programs.get(making) for making in (first, *others)] == found


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(mounts=(Mount(source=Path("/a\0b"), target="/x"),)),
        SandboxSpec(env={"NAME": "a\0b"}),
        SandboxSpec(env={"NA\0ME": "b"}),
    ],
    ids=["source", "variable", "name"],
)
async def test_a_zero_byte_is_refused(driver: NamespaceDriver, spec: SandboxSpec) -> None:
    with pytest.raises(SandboxError, match="zero byte"):
        await driver.start(spec)
    assert not driver.sandboxes


def test_a_program_with_a_zero_byte_is_refused() -> None:
    making = replace(small("x"), workdir="/a\0b")
    with pytest.raises(ValueError, match="zero byte"):
        LaunchProgramCache().get(making)
    assert "zero byte" in why_refused(making)


# Refused launches


@dataclass(frozen=True, slots=True)
class Tried:
    """The reason for a maker's refusal, and whether every holder of the sandbox's lifetime closed it."""

    refused: str
    ended: bool


def tried(making: LaunchPlan, taken: list[Step]) -> Tried:
    """Make a sandbox by these steps, and close it."""
    fd = in_memory(program(os.uname().machine, taken))
    own = os.open(making.own, os.O_PATH | os.O_DIRECTORY)
    ours, its_lifetime = socket.socketpair()
    way, its_way = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = LaunchProgram(making)
    with ours, way:
        with its_lifetime, its_way:
            pid = spawn(["", "sandbox"], [its_lifetime.fileno(), its_way.fileno(), own, fd])
        os.close(own)
        os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            way.send(GO)
        while not (refused := words.refusal(said := way.recv(ENDING_SIZE))) and said != GO:
            pass
        way.close()
        ours.shutdown(socket.SHUT_WR)
        ours.settimeout(10)
        over = ours.recv(1) == b""
    os.waitpid(pid, 0)
    return Tried(refused, over)


@contextmanager
def everything(tmp_path: Path) -> Iterator[LaunchPlan]:
    """Plan of a sandbox that uses every feature."""
    system = [option for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).is_dir()
              for option in ("--ro-bind", path, path)]  # fmt: skip
    for name in ("work", "upper", "overlay", "lower"):
        (tmp_path / name).mkdir()
    own = f"{tmp_path}/"
    mounts = (
        *system,
        *("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"),
        *(
            "--perms",
            "755",
            "--size",
            "4096",
            "--tmpfs",
            "/run",
            "--dir",
            "/var",
            "--symlink",
            "/run",
            "/var/run",
        ),
        *("--bind", f"{own}work", "/work"),
        *("--overlay-src", f"{own}lower", "--overlay", f"{own}upper", f"{own}overlay", "/over"),
    )
    limits = ((resource.RLIMIT_CORE, 0, 0), (resource.RLIMIT_NOFILE, 512, 1024))
    trial = ("/bin/sh", "-c", ":")
    yield replace(small("x"), mounts=mounts, own=own, workdir="/work", rlimits=limits, trial=trial)
    if (left := tmp_path / "overlay" / "work").exists():
        left.chmod(0o700)


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[LaunchPlan]:
    with everything(tmp_path) as making:
        yield making


def test_a_sandbox_stops_with_its_lifetime(whole: LaunchPlan) -> None:
    assert tried(whole, steps(whole)) == Tried("", True)
    assert why_refused(whole) == ""


def test_each_failing_step_is_reported_and_leaks_nothing(whole: LaunchPlan) -> None:
    """Every step in turn, until the host is notified that the sandbox is made. The first process can no
    longer reach the host during its last steps."""
    taken = steps(whole)
    told = next(i for i, step in enumerate(taken) if isinstance(step, Call) and step.name == "sendmsg")
    first = taken.index(Label("first"))
    last = taken.index(Label("wait")) - 2
    tries = 0
    for index in (*range(told), *range(first, last)):
        step = taken[index]
        if isinstance(step, Call) and step.least is not ANY and step.otherwise == FAIL:
            wrong = Call("close", (777,), step.what)
            outcome = tried(whole, [*taken[:index], wrong, *taken[index + 1 :]])
            assert outcome == Tried(f"{step.what or 'making it'}: Bad file descriptor", True), step
            tries += 1
    assert tries > 100


@pytest.mark.parametrize("whom", ["maker", "first"])
def test_if_maker_or_first_process_dies_half_way_the_other_exits(whole: LaunchPlan, whom: str) -> None:
    taken = steps(whole)
    place = taken.index(Label("first")) + 3
    if whom == "maker":
        place = next(i for i, step in enumerate(taken) if isinstance(step, Call) and step.name == "clone") + 2
    killed = Call("exit_group", (9,), least=ANY)
    outcome = tried(whole, [*taken[:place], killed, *taken[place + 1 :]])
    assert outcome.ended
    maker, first = (
        ("the process that makes it ended", "the first process: Broken pipe"),
        "the first process: it ended",
    )
    assert outcome.refused in (maker if whom == "maker" else (first,))


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (("/bin/absent",), "execvp /bin/absent: No such file or directory"),
        (("/work",), "execvp /work: Permission denied"),
        (("/bin/sh", "-c", "exit 7"), "execvp /bin/sh: ended with 7"),
        (("/bin/sh", "-c", "kill -9 $$"), "execvp /bin/sh: ended with -9"),
        (("/bin/sh", "-c", 'test "$PWD $(umask) $(ulimit -n)" = "/work 0022 512"'), ""),
        (
            (
                "/bin/sh",
                "-c",
                'set /*; test "$*" = "$(echo /bin /dev /lib* /over /proc /run /usr /var /work)"',
            ),
            "",
        ),
    ],
)
def test_a_command_that_cannot_run_is_reported(whole: LaunchPlan, trial: tuple[str, ...], said: str) -> None:
    assert why_refused(replace(whole, trial=trial)) == said


def test_no_user_namespace_can_be_made_inside_even_without_a_filter(whole: LaunchPlan) -> None:
    """The limit of one namespace prevents it."""
    nothing = Call("umask", (0o22,))
    for script, said in (
        ("unshare --user true 2>/dev/null; exit $((40 + $?))", "execvp /bin/sh: ended with 41"),
        ("grep -q 'Seccomp:.0' /proc/self/status", ""),  # there is no filter
    ):
        making = replace(whole, trial=("/bin/sh", "-c", script))
        filters = [isinstance(step, Call) and step.name == "seccomp" for step in steps(making)]
        pairs = zip(steps(making), filters, strict=True)
        assert tried(making, [nothing if filter_ else step for step, filter_ in pairs]).refused == said


async def test_a_failing_step_is_named(driver: NamespaceDriver, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    spec = SandboxSpec(mounts=(Mount(source=gone, target="/here"),))
    gone.rmdir()
    with pytest.raises(SandboxError, match=r"source path .*gone: No such file") as caught:
        await driver.start(spec)
    assert "must exist" in caught.value.hint
    with pytest.raises(SandboxError, match="Can't mkdir /usr/x: Read-only"):
        await driver.start(SandboxSpec(mounts=(Mount(source=tmp_path, target="/usr/x"),)))
    assert not driver.sandboxes


async def test_a_source_behind_links_is_resolved_on_the_host(driver: NamespaceDriver, tmp_path: Path) -> None:
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
    sandbox = await start(driver, SandboxSpec(mounts=mounts))
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
        ("false", "execvp /bin/sh: ended with 1"),
        ("another machine's", "execvp /bin/sh: Exec format error"),
    ],
    ids=["none", "fails", "another machine's"],
)
async def test_an_image_whose_shell_cannot_run_is_refused(
    driver: NamespaceDriver, packed: Callable[[Path], Path], tmp_path: Path, shell: str, said: str
) -> None:
    root = write_rootfs(tmp_path / "root", ("false",))
    if shell == "false":
        (root / "bin" / "false").rename(root / "bin" / "sh")
    elif shell:
        other = "aarch64" if os.uname().machine == "x86_64" else "x86_64"
        (root / "bin" / "sh").write_bytes(program(other, ()))
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
from prorl_envs.sandbox.drivers.namespaces import NamespaceDriver

async def main():
    driver = NamespaceDriver()
    await driver.warm("base")
    print(driver.starter.pid, flush=True)
    # So many that it takes a while.
    mounts = tuple(Mount(source=Path("/usr"), target=f"/m{i}") for i in range(500))
    await driver.start(SandboxSpec(mounts=mounts))
    print("started", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("whom", ["service", "starter", "maker"])
def test_a_process_killed_during_a_start_leaks_nothing(run_dir: Path, whom: str, after_s: float) -> None:
    before = OpenResources.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        starter = int(service.stdout.readline())
        if whom == "maker":
            maker = child_of(starter)
            time.sleep(after_s)
            if maker is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(maker, signal.SIGKILL)
                os.close(maker)
        else:
            time.sleep(after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(service.pid if whom == "service" else starter, signal.SIGKILL)
        said, errors = service.communicate(timeout=60)
    assert service.returncode == -signal.SIGKILL or said == "started\n" or "SandboxError" in errors
    asyncio.run(NamespaceDriver().aclose())  # the next driver removes them
    assert leaks_since(before, run_dir) == []


def child_of(starter: int) -> int | None:
    """Return a pidfd of the first child that runs a program in memory; None if the start was faster."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            children = Path(f"/proc/{starter}/task/{starter}/children").read_text()
        except FileNotFoundError:  # it has ended
            return None
        for pid in map(int, children.split()):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sandbox\0":
                    return pidfd
                os.close(pidfd)
    raise AssertionError("no sandbox was made")


# Shells


def close(begun: OpenedTerminal) -> None:
    for fd in (begun.terminal, begun.report, begun.process, begun.text, begun.exits):
        os.close(fd)


def number(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))


def own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def namespace(pid: int | str, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


def words(pid: int, name: str) -> list[str]:
    """Return the parts of a file in /proc that are separated by zero bytes."""
    return Path(f"/proc/{pid}/{name}").read_text().removesuffix("\0").split("\0")


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def say(begun: OpenedTerminal, command: str) -> str:
    """Type a line; return its output."""
    os.write(begun.terminal, f"{command}\nprintf 'over%s' .\n".encode())
    said = ""
    async with asyncio.timeout(30):
        while "over." not in said:
            await readable(begun.terminal)
            said += os.read(begun.terminal, 4096).decode()
    # Before its first prompt bash may print warnings about the terminal.
    return said.removesuffix("over.")


async def exits(begun: OpenedTerminal, count: int) -> list[tuple[int, int, int]]:
    """Pid, code and status of each process that exited."""
    found = []
    with socket.socket(fileno=os.dup(begun.exits)) as sock:
        async with asyncio.timeout(30):
            for _ in range(count):
                said, _ = await receive(sock, 4096)
                assert len(said) == ENDING_SIZE
                signal_number, _, code, _, pid, _, value = struct.unpack_from("=7i", said)
                assert signal_number == signal.SIGCHLD
                found.append((pid, code, value))
    return found


@contextlib.asynccontextmanager
async def shell(
    driver: NamespaceDriver, spec: SandboxSpec | None = None
) -> AsyncIterator[tuple[NamespaceSandbox, OpenedTerminal]]:
    sandbox = await start(driver, spec)
    begun = await sandbox.open_shell()
    assert begun is not None
    try:
        yield sandbox, begun
    finally:
        close(begun)
        await sandbox.close()


async def test_a_shell_has_the_planned_properties_and_no_others(driver: NamespaceDriver) -> None:
    spec = SandboxSpec(workdir="/some/where", env={"NAME": "a value\nof two lines", "TERM": "other"}, uid=7)
    async with shell(driver, spec) as (sandbox, begun):
        pid, plan = number(begun.process), pkgutil.resolve_name(SHELL)(default_environment(spec), spec.env)
        rows, columns = plan.size
        expected = f"/some/where\n/dev/pts/0\n{status(pid)['NSpid'].split()[-1]} 0 7\n{rows} {columns}\n"
        assert await say(begun, "pwd; tty; echo $$ $PPID $(id -u); stty size") == expected
        assert set(descriptors(pid)) - {255} == SHELL_FDS, "and bash's own way to its terminal"
        assert sorted(words(pid, "environ")) == sorted(f"{key}={value}" for key, value in plan.env.items())
        program, *arguments = words(pid, "cmdline")
        assert program in plan.programs
        assert tuple(arguments) == plan.arguments
        found = status(pid)
        assert {int(found[name], 16) for name in CAPABILITIES} == {0}
        assert (found["NoNewPrivs"], found["Seccomp"], found["Umask"]) == ("1", "2", "0022")
        assert int(found["PPid"]) == maker_pid(sandbox)
        for name in ("pid", "mnt", "user", "net", "uts", "ipc", "cgroup"):
            assert namespace(pid, name) == namespace(sandbox.pid, name)
        fields = words(pid, "stat")[0].rpartition(")")[2].split()
        assert int(fields[3]) == pid, "it leads a session"
        assert int(fields[4]) != 0, "which has a terminal"


async def test_signals_that_a_shell_ignores_are_not_ignored_in_its_programs(driver: NamespaceDriver) -> None:
    async with shell(driver) as (_, begun):
        said = await say(begun, "grep SigIgn /proc/self/status")
        # Two above are the C library's own.
        assert int(said.split()[1], 16) & 0xFFFF_FFFF >> 1 == 0


async def test_a_shell_reads_text_and_writes_reports(driver: NamespaceDriver) -> None:
    async with shell(driver) as (_, begun):
        os.pwrite(begun.text, b"from the host\n", 0)
        assert await say(begun, "read -u 40 line; echo $line; echo report >&41") == "from the host\n"
        assert os.read(begun.report, 4096) == b"report\n"
        with pytest.raises(BlockingIOError):
            os.read(begun.report, 4096)
        with pytest.raises(BlockingIOError):
            os.read(begun.terminal, 4096)
        for fd in (begun.terminal, begun.report, begun.process, begun.text, begun.exits):
            assert not os.get_inheritable(fd)


async def test_the_exit_status_of_a_shell_is_reported(driver: NamespaceDriver) -> None:
    async with shell(driver) as (sandbox, begun):
        pid = number(begun.process)
        os.write(begun.terminal, b"exit 3\n")
        assert await exits(begun, 1) == [(pid, os.CLD_EXITED, 3)]
        assert ended(begun.process)
        assert sandbox.alive
        assert await run_script(sandbox, "echo here") == "here\n"


async def test_the_signal_that_killed_a_shell_is_reported(driver: NamespaceDriver) -> None:
    async with shell(driver) as (sandbox, begun):
        pid = number(begun.process)
        signal.pidfd_send_signal(begun.process, signal.SIGKILL)
        assert await exits(begun, 1) == [(pid, os.CLD_KILLED, signal.SIGKILL)]
        assert sandbox.alive


async def test_children_that_outlive_a_shell_are_not_reported_as_the_shell(driver: NamespaceDriver) -> None:
    async with shell(driver) as (sandbox, begun):
        pid = number(begun.process)
        await say(begun, "(setsid sleep 0.3 &)")
        os.write(begun.terminal, b"kill -9 $$\n")
        assert await exits(begun, 1) == [(pid, os.CLD_KILLED, signal.SIGKILL)]
        await asyncio.sleep(0.3)
        with socket.socket(fileno=os.dup(begun.exits)) as sock, pytest.raises(BlockingIOError):
            sock.recv(4096)
        assert sandbox.alive


async def test_the_end_of_a_sandbox_is_reported_last(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    begun = await sandbox.open_shell()
    assert begun is not None
    pids = {number(begun.process), sandbox.pid}
    os.kill(sandbox.pid, signal.SIGKILL)
    assert {pid for pid, _, _ in await exits(begun, 2)} == pids
    with socket.socket(fileno=os.dup(begun.exits)) as sock:
        assert await receive(sock, 4096) == (b"", [])
    assert not sandbox.alive
    close(begun)
    await sandbox.close()


async def test_a_shell_is_handed_out_once(driver: NamespaceDriver) -> None:
    async with shell(driver) as (sandbox, begun):
        assert await sandbox.open_shell() is None
        assert await say(begun, "echo still here") == "still here\n"


async def test_of_two_concurrent_requests_one_gets_the_shell(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    given = [begun for begun in await asyncio.gather(*(sandbox.open_shell() for _ in range(3))) if begun]
    assert len(given) == 1
    close(given[0])
    await sandbox.close()


async def test_many_shells_are_each_in_their_own_sandbox(driver: NamespaceDriver) -> None:
    async def one() -> bool:
        async with shell(driver) as (sandbox, begun):
            await say(begun, f"echo {sandbox.id} > file")
            return (sandbox.workspace / "file").read_text() == f"{sandbox.id}\n"

    assert all(await asyncio.gather(*(one() for _ in range(12))))


async def test_without_bash_there_is_no_shell(driver: NamespaceDriver, busybox_image: Path) -> None:
    sandbox = await start(driver, SandboxSpec(image=busybox_image))
    assert await sandbox.open_shell() is None
    assert await sandbox.open_shell() is None
    assert sandbox.alive
    assert await run_script(sandbox, "cat /etc/image") == "from the image\n"
    await sandbox.close()


async def test_the_first_bash_in_the_path_is_used(driver: NamespaceDriver, tmp_path: Path) -> None:
    image = write_rootfs(tmp_path / "root", ("sh", "bash"))
    (image / "own").mkdir()
    shutil.copy(image / "bin" / "bash", image / "own" / "bash")
    spec = SandboxSpec(image=image, env={"PATH": "/absent:/own:/bin"})
    async with shell(driver, spec) as (_, begun):
        assert await say(begun, 'echo "$BASH $PATH"') == "/own/bash /absent:/own:/bin\n"


async def test_a_sandbox_without_a_path_has_no_shell(driver: NamespaceDriver) -> None:
    sandbox = await start(driver, SandboxSpec(env={"PATH": ""}))
    if (begun := await sandbox.open_shell()) is not None:  # a bash in the working directory
        close(begun)
    assert sandbox.alive
    await sandbox.close()


def test_a_plan_without_programs_is_no_plan(whole: LaunchPlan) -> None:
    plan = TerminalPlan(
        programs=(), arguments=(), env={}, settings=bytes(36), size=(50, 80), text_fd=40, report_fd=41
    )
    making = replace(whole, shell=plan)
    assert tried(making, steps(making)) == Tried("", True)


async def test_a_closed_sandbox_opens_no_shell(driver: NamespaceDriver) -> None:
    closed, killed = await start(driver), await start(driver)
    await closed.close()
    os.kill(killed.pid, signal.SIGKILL)
    await until(lambda: not killed.alive)
    for sandbox in (closed, killed):
        with pytest.raises(SandboxError, match=r"ended|closed"):
            await sandbox.open_shell()
    await killed.close()


async def test_a_sandbox_that_closes_during_the_request_opens_no_shell(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    maker = maker_pid(sandbox)
    os.kill(maker, signal.SIGSTOP)
    beginning = asyncio.create_task(sandbox.open_shell())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(sandbox.close())
    with pytest.raises(SandboxError, match=r"ended|closed"):
        await beginning
    await closing


def inside(sandbox: NamespaceSandbox) -> set[int]:
    """Return the host's processes in the sandbox's pid namespace."""
    own, found = namespace(sandbox.pid, "pid"), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if namespace(entry.name, "pid") == own:
                    found.add(int(entry.name))
    return found


async def test_a_request_cancelled_at_any_moment_leaks_nothing(driver: NamespaceDriver) -> None:
    for tenths_ms in (None, *range(0, 20, 2), *range(20, 100, 20)):
        sandbox = await start(driver)
        before = own_descriptors()
        beginning = asyncio.create_task(sandbox.open_shell())
        if tenths_ms is not None:
            await asyncio.sleep(0)
            await asyncio.wait([beginning], timeout=tenths_ms / 10_000)
        beginning.cancel()
        (outcome,) = await asyncio.gather(beginning, return_exceptions=True)
        if isinstance(outcome, asyncio.CancelledError):
            outcome = await sandbox.open_shell()  # the request had not even been sent
            assert outcome is None or tenths_ms is None
        if outcome is not None:
            assert isinstance(outcome, OpenedTerminal)
            close(outcome)
        await until(lambda sandbox=sandbox: inside(sandbox) == {sandbox.pid})  # type: ignore[misc]
        assert own_descriptors() < before, "the way to its maker is closed, and nothing else is open"
        assert sandbox.alive
        await sandbox.close()


async def test_a_request_cancelled_while_the_shell_starts_leaks_nothing(driver: NamespaceDriver) -> None:
    sandbox = await start(driver)
    maker = maker_pid(sandbox)
    os.kill(maker, signal.SIGSTOP)
    beginning = asyncio.create_task(sandbox.open_shell())
    await asyncio.sleep(0.01)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    os.kill(maker, signal.SIGCONT)
    assert await sandbox.open_shell() is None
    await asyncio.sleep(0.1)
    await until(lambda: inside(sandbox) == {sandbox.pid})
    await sandbox.close()


def has(groups: Mechanism) -> bool:
    try:
        return find_groups(groups) is not None
    except SandboxError:
        return False


@pytest.mark.parametrize("mechanism", [Mechanism.CGROUP2, Mechanism.CGROUP1])
async def test_control_groups_hold_all_processes_of_a_sandbox(run_dir: Path, mechanism: Mechanism) -> None:
    if not has(mechanism):
        pytest.skip(f"this machine lends no control groups of {mechanism.value}")
    driver = NamespaceDriver(limits=NodeLimits(enforcement=mechanism), templates=SCRIPT_TEMPLATES)
    try:
        async with shell(driver) as (sandbox, begun):
            assert sandbox.contained.group is not None
            folders = sandbox.contained.group.folders
            assert folders
            for folder in folders:
                held = set(map(int, (Path(folder) / "cgroup.procs").read_text().split()))
                assert held == {maker_pid(sandbox), sandbox.pid, number(begun.process)}
            job = (
                await say(begun, "sleep 100 & grep -c prorl /proc/$!/cgroup; grep -c : /proc/$!/cgroup")
            ).split()
            assert job, "its groups are its root"
    finally:
        await driver.aclose()
