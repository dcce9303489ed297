"""What is particular to sandboxes that no other program makes; what they have in common with others is
promised in the conformance suite."""

import asyncio
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
from prorl_envs.sandbox.waiter import program
from prorl_envs.testing.leaks import Holdings, leaks_since
from prorl_envs.testing.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio

RUN = {"x86_64": (), "aarch64": ("qemu-aarch64-static",)}


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[NamespaceDriver]:
    driver = NamespaceDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


@pytest.mark.parametrize("machine", RUN)
def test_the_waiter_ends_with_its_input_and_not_before(machine: str, tmp_path: Path) -> None:
    runner = RUN[machine]
    if runner and shutil.which(runner[0]) is None:
        pytest.skip(f"no {runner[0]} here to run another machine's program")
    path = tmp_path / "waiter"
    path.write_bytes(program(machine))
    path.chmod(0o755)
    with subprocess.Popen([*runner, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiter:
        assert waiter.stdin is not None
        assert waiter.stdout is not None
        waiter.stdin.write(b"some input\n")
        waiter.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(0.2)
        assert Path(f"/proc/{waiter.pid}/comm").read_text() == "sandbox\n"
        waiter.stdin.close()
        assert waiter.wait(5) == 0
        assert waiter.stdout.read() == b""


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


#: Makes a sandbox whose first process cannot become the waiter: a program in memory that is none, or nothing.
WITHOUT = """\
import socket, sys, os
from prorl_envs.sandbox import enclose
enclose.waiter = lambda: {fd}
mounts = [option for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.isdir(path)
          for option in ("--ro-bind", path, path)]
ours, theirs = socket.socketpair()
command = ["/bin/sh", "-c", "echo instead; read _; echo over"]
more = {{"tries_command": False, "command": command}}
request = {{"mounts": mounts, "uid": 1, "hostname": "x", "network": False, **more}}
pid = enclose.clone_first(request, theirs.fileno())
theirs.close()
said = b""
while b"instead" not in said:
    said += ours.recv(100)
ours.shutdown(socket.SHUT_WR)
while more := ours.recv(100):
    said += more
print(said, os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize(
    ("fd", "said"),
    [("None", rb"instead\nover\n"), ('os.open("/dev/null", os.O_RDONLY)', rb"ready\ninstead\nover\n")],
    ids=["none", "refused"],
)
def test_where_no_program_in_memory_may_run_a_shell_takes_its_place(fd: str, said: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(fd=fd)], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"b'{said.decode()}' 0\n", done.stderr


def test_no_user_namespace_can_be_made_inside_whatever_the_filter_says() -> None:
    """The first process is not filtered: what holds it is that there can be one such namespace alone."""
    script = WITHOUT.format(fd="None").replace("echo instead;", "unshare --user true; echo instead;")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "No space left on device" in done.stdout, done.stderr


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
    await driver._warm_starter()
    print(driver.starter.pid, flush=True)
    # So many that it takes a while.
    mounts = tuple(Mount(source=Path("/usr"), target=f"/m{i}") for i in range(500))
    await driver.start(SandboxSpec(mounts=mounts))
    print("started", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("whom", ["service", "starter"])
def test_killed_while_a_sandbox_is_made_nothing_is_left(run_dir: Path, whom: str, after_s: float) -> None:
    before = Holdings.now(run_dir)
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        starter = int(service.stdout.readline())
        time.sleep(after_s)
        if whom == "service":
            service.send_signal(signal.SIGKILL)
        else:
            subprocess.run(["kill", "-KILL", str(starter)], check=False)
        said, errors = service.communicate(timeout=60)
    # A starter that dies before it has told the service of the first process fails the start, later no more.
    assert service.returncode == -signal.SIGKILL or said == "started\n" or "SandboxError" in errors
    asyncio.run(NamespaceDriver().aclose())  # the next driver sweeps
    assert leaks_since(before, run_dir) == []
