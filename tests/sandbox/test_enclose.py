"""What is particular to sandboxes that no other program makes; what they have in common with others is
promised in the conformance suite."""

import ast
import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.namespaces import NamespaceDriver
from prorl_envs.sandbox.waiter import Call, program
from prorl_envs.testing.leaks import Holdings, leaks_since
from prorl_envs.testing.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio

RUN = {"x86_64": (), "aarch64": ("qemu-aarch64-static",)}


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[NamespaceDriver]:
    driver = NamespaceDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


def command(machine: str, tmp_path: Path, *calls: Call) -> list[str]:
    """Runs a program of these calls, on whatever machine this is."""
    runner = RUN[machine] if machine != os.uname().machine else ()
    if runner and shutil.which(runner[0]) is None:
        pytest.skip(f"no {runner[0]} here to run another machine's program")
    path = tmp_path / "program"
    path.write_bytes(program(machine, calls))
    path.chmod(0o755)
    return [*runner, str(path)]


@pytest.mark.parametrize("machine", RUN)
def test_a_program_makes_its_calls_and_ends_with_its_input_and_not_before(
    machine: str, tmp_path: Path
) -> None:
    calls = (
        Call("prctl", (15, b"named\0")),
        Call("write", (1, b"first ", 6), 6),
        Call("read", (0, None, 1), 1),
        Call("write", (1, b"then", 4), 4),
        Call("close", (1,)),
    )
    run = command(machine, tmp_path, *calls)
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        assert waiter.stdout.read(6) == b"first "
        waiter.stdin.write(b"some input\n")
        waiter.stdin.flush()
        assert waiter.stdout.read() == b"then"
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(0.2)
        assert Path(f"/proc/{waiter.pid}/comm").read_text() == "named\n"
        waiter.stdin.close()
        assert waiter.wait(5) == 0


@pytest.mark.parametrize("machine", RUN)
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (Call("mount", (b"\0", b"/absent\0", b"\0", 4096, 0)), (errno.ENOENT, errno.EPERM)),
        (Call("openat", (77, b"name\0", 0)), (errno.EBADF,)),
        (Call("setns", (77, 0)), (errno.EBADF,)),
        (Call("capset", (bytes(8), bytes(24))), (errno.EFAULT,)),
        (Call("rt_sigaction", (9, bytes(32), 0, 8)), (errno.EINVAL,)),
        (Call("close", (77,)), (errno.EBADF,)),
        (Call("prctl", (9999,)), (errno.EINVAL,)),
        (Call("read", (0, None, 1), 2), (256 - 1,)),  # one byte, where more were wanted
    ],
    ids=lambda value: value.name if isinstance(value, Call) else "",
)
def test_it_ends_with_the_error_of_the_call_that_fails(
    machine: str, call: Call, error: tuple[int, ...], tmp_path: Path
) -> None:
    run = command(machine, tmp_path, call, Call("write", (1, b"went on", 7)))
    done = subprocess.run(run, input=b"x", stdout=subprocess.PIPE, check=False)
    assert done.returncode in error
    assert done.stdout == b""


async def test_the_first_process_is_the_waiter_and_tells_nothing(driver: NamespaceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    script = (
        "tr '\\0' ' ' < /proc/1/cmdline; echo; cat /proc/1/status; "
        "for secret in exe cwd root fd/0 ns/user; do readlink /proc/1/$secret; done; "
        "for secret in environ maps mem; do head -c 1 /proc/1/$secret 2>/dev/null; done"
    )
    line, _, status = (await run_script(sandbox, script)).partition("\n")
    assert line == "sandbox "
    assert "NoNewPrivs:\t1" in status
    assert status.splitlines()[-1].startswith("nonvoluntary_ctxt_switches"), "and nothing that is secret"
    assert int(status.partition("VmRSS:")[2].split()[0]) < 100, "KB"
    await sandbox.close()


async def test_orphans_are_reaped(driver: NamespaceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    script = "for i in 1 2 3; do setsid sh -c 'sleep 0.05 & :' & done; wait; sleep 0.5; cat /proc/[0-9]*/stat"
    processes = (await run_script(sandbox, script)).splitlines()
    assert processes
    assert not [line for line in processes if line.rpartition(") ")[2].startswith("Z")]
    await sandbox.close()


#: Goes into a sandbox of its own, and says what came of it.
ENCLOSE = """\
import os, socket
from prorl_envs.sandbox import enclose
{before}
mounts = [option for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.isdir(path)
          for option in ("--ro-bind", path, path)]
ours, theirs = socket.socketpair()
mounts += ["--proc", "/proc", "--dev", "/dev"]
request = {{"mounts": mounts, "uid": 1, "hostname": "x", "network": False}}
try:
    first = enclose.enclose(request, theirs.fileno())
    theirs.close()
    enclose.try_out({command})
    print(os.listdir("/"))
    ours.close()
    print(os.waitpid(first, 0)[1])
except OSError as error:
    print(error.strerror)
"""


def enclosed(before: str = "", command: list[str] | None = None) -> str:
    script = ENCLOSE.format(before=before, command=command or [])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


def test_a_process_goes_into_a_sandbox_whose_first_process_ends_with_its_lifetime() -> None:
    root, status = enclosed().splitlines()
    assert set(ast.literal_eval(root)) <= {"usr", "bin", "lib", "lib64", "proc", "dev"}
    assert status == "0"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("enclose.waiter = lambda: None", "this machine runs no program from memory"),
        ('enclose.waiter = lambda: os.open("/dev/null", os.O_RDONLY)', "Permission denied"),
        (
            "from prorl_envs.sandbox import waiter; calls = list(waiter.CALLS);"
            " calls[1] = waiter.Call('mount', (b'proc\\0', b'/absent\\0', b'proc\\0', 0, 0));"
            " waiter.program.__defaults__ = (calls,)",
            "Can't mount proc on /proc: No such file or directory",
        ),
        (
            "from prorl_envs.sandbox import waiter; calls = list(waiter.CALLS);"
            " calls[5] = waiter.Call('setns', (77, 0)); waiter.program.__defaults__ = (calls,)",
            "the first process: Bad file descriptor",
        ),
    ],
    ids=["no memory", "no program", "no proc", "no user namespace"],
)
def test_what_the_first_process_cannot_do_is_told(before: str, said: str) -> None:
    assert said in enclosed(before)


def test_what_a_sandbox_cannot_run_is_told() -> None:
    assert enclosed(command=["/bin/absent"]) == "execvp /bin/absent: No such file or directory\n"
    assert enclosed(command=["/bin/sh", "-c", "exit 7"]) == "execvp /bin/sh: ended with 7\n"


def test_no_user_namespace_can_be_made_inside_whatever_the_filter_says() -> None:
    """The first process is not filtered: what holds it is that there can be one such namespace alone."""
    assert enclosed(command=["/bin/sh", "-c", "unshare --user true 2>/dev/null; exit $((40 + $?))"]) == (
        "execvp /bin/sh: ended with 41\n"
    )


async def test_a_step_that_fails_is_named(driver: NamespaceDriver, tmp_path: Path) -> None:
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


async def test_a_source_behind_links_is_found_as_the_host_finds_it(
    driver: NamespaceDriver, tmp_path: Path
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


STARTING = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.namespaces import NamespaceDriver

async def main():
    driver = NamespaceDriver()
    await driver.warm("base")
    print(driver.templates["base"].pid, flush=True)
    # So many that it takes a while.
    mounts = tuple(Mount(source=Path("/usr"), target=f"/m{i}") for i in range(500))
    await driver.start(SandboxSpec(mounts=mounts))
    print("started", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("whom", ["service", "template"])
def test_killed_while_a_sandbox_is_made_nothing_is_left(run_dir: Path, whom: str, after_s: float) -> None:
    before = Holdings.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        template = int(service.stdout.readline())
        time.sleep(after_s)
        if whom == "service":
            service.send_signal(signal.SIGKILL)
        else:
            subprocess.run(["kill", "-KILL", str(template)], check=False)
        said, errors = service.communicate(timeout=60)
    # A template that dies before it has told the service of the first process fails the start, later no more.
    assert service.returncode == -signal.SIGKILL or said == "started\n" or "SandboxError" in errors
    asyncio.run(NamespaceDriver().aclose())  # the next driver sweeps
    assert leaks_since(before, run_dir) == []
