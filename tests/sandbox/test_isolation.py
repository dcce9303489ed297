"""Isolation of processes in real sandboxes: visible objects and permitted actions."""

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.support.sandbox_entry import RUN_SCRIPTS, ask, run_script

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sandbox(shell_driver: BubblewrapDriver) -> AsyncIterator[Sandbox]:
    sandbox = await shell_driver.start(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def run_with(driver: BubblewrapDriver, spec: SandboxSpec, script: str) -> str:
    sandbox = await driver.start(spec)
    try:
        return await run_script(sandbox, script)
    finally:
        await sandbox.close()


async def test_only_its_own_processes_are_visible(sandbox: Sandbox) -> None:
    """The tool server is not visible, because only its children are in the sandbox's pid namespace."""
    listing = await run_script(sandbox, "cat /proc/[0-9]*/comm")
    assert sorted(listing.split()) in (["sandbox", "sh"], ["sh", "sh"])


async def test_killing_everything_spares_the_first_process_and_the_tool_server(sandbox: Sandbox) -> None:
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        assert (await ask(sock, "kill -9 -1; kill -9 1; echo done")).endswith("done\n")
        signals = "for s in STOP TERM HUP INT QUIT ALRM USR1 USR2 CHLD PIPE SEGV WINCH; do kill -$s 1; done"
        assert await ask(sock, f"{signals}; sleep 0.1") == ""
        assert await ask(sock, "echo again") == "again\n"
    assert sandbox.alive


@pytest.mark.parametrize("secret", ["environ", "mem", "fd/0", "root"])
async def test_the_first_process_cannot_be_inspected(sandbox: Sandbox, secret: str) -> None:
    """A tracing process could keep the first process alive after the end of the service."""
    assert "denied" in await run_script(sandbox, f"LC_ALL=C ls -L /proc/1/{secret}/ < /proc/1/{secret} 2>&1")


async def test_a_process_has_no_capabilities_and_cannot_gain_any(sandbox: Sandbox) -> None:
    status = await run_script(sandbox, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    fields = dict(line.split(":\t") for line in status.splitlines())
    assert fields.pop("NoNewPrivs") == "1"
    assert {int(value, 16) for value in fields.values()} == {0}


async def test_root_inside_has_no_capability_either(shell_driver: BubblewrapDriver) -> None:
    output = await run_with(
        shell_driver, SandboxSpec(uid=0), "id -u; whoami; grep CapEff /proc/self/status; chown 5 /tmp"
    )
    uid, name, capabilities, refusal = output.splitlines()
    assert (uid, name) == ("0", "root")
    assert capabilities.endswith("\t0000000000000000")
    assert "chown" in refusal


async def test_further_user_namespaces_cannot_be_made(sandbox: Sandbox) -> None:
    assert "unshare failed" in await run_script(sandbox, "unshare --user true")


async def test_the_hosts_environment_is_not_passed_on(sandbox: Sandbox) -> None:
    names = await run_script(sandbox, "env | cut -d= -f1 | sort")
    assert set(names.split()) == {"HOME", "LANG", "PATH", "PWD", "TERM"}


async def test_the_specs_environment_is_passed_on(shell_driver: BubblewrapDriver) -> None:
    text = "a b\n'\"$(x)`y`\\ \t☃ * \u00e9" + "x" * 20_000
    spec = SandboxSpec(env={"TEXT": text, "EMPTY": "", "HOME": "/tmp", "TERM": "vt100"})
    script = 'printf "%s|%s|%s|%s" "$TEXT" "${EMPTY-unset}" "$HOME" "$TERM"'
    assert await run_with(shell_driver, spec, script) == f"{text}||/tmp|vt100"


async def test_no_descriptor_of_the_host_is_inherited(sandbox: Sandbox) -> None:
    listing = await run_script(sandbox, "ls -l /proc/self/fd | grep -v ' /proc/' | grep -o ' [0-9]* -> .*'")
    numbers = [line.split()[0] for line in listing.splitlines()]
    assert numbers == ["0", "1", "2"]


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/root", "/sys", "/etc/ssl/private", "/boot", str(Path.cwd())]
)
async def test_the_hosts_files_are_hidden(sandbox: Sandbox, path: str) -> None:
    assert await run_script(sandbox, f"test -e {path} || echo no") == "no\n"


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname", "/var/x", "/home/x"]
)
async def test_the_system_is_read_only(sandbox: Sandbox, path: str) -> None:
    assert "Read-only file system" in await run_script(sandbox, f"LC_ALL=C; echo x > {path}")


@pytest.mark.parametrize("path", ["/workspace", "/tmp", "/home/agent", "/run", "/dev/shm", "/var/tmp"])
async def test_these_directories_are_writable(sandbox: Sandbox, path: str) -> None:
    assert await run_script(sandbox, f"echo x > {path}/file && cat {path}/file") == "x\n"


async def test_the_workspace_is_the_hosts_directory(sandbox: Sandbox) -> None:
    assert await run_script(sandbox, "pwd; umask; echo hello > made") == "/workspace\n0022\n"
    made = sandbox.workspace / "made"
    assert made.read_text() == "hello\n"
    assert made.stat().st_uid == os.geteuid()
    assert sandbox.workspace.parent.stat().st_mode & 0o777 == 0o700


async def test_sandboxes_do_not_see_each_other(shell_driver: BubblewrapDriver, sandbox: Sandbox) -> None:
    await run_script(
        sandbox, "touch /workspace/a /tmp/b /dev/shm/c /home/agent/d /run/e; sleep 60 > /dev/null 2>&1 &"
    )
    look = (
        "ls -A /workspace /tmp /dev/shm /home/agent /run | grep -v :; "
        "grep -shx sleep /proc/[0-9]*/comm; echo end"
    )
    assert (await run_with(shell_driver, SandboxSpec(), look)).split() == ["end"]


async def test_only_loopback_exists_and_no_address_can_be_reached(sandbox: Sandbox) -> None:
    interfaces = await run_script(
        sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1; cat /proc/net/route | wc -l"
    )
    assert interfaces.split() == ["lo", "1"]
    refusal = await run_script(sandbox, "LC_ALL=C bash -c '</dev/tcp/192.0.2.1/80'")
    assert "Network is unreachable" in refusal


async def test_the_hosts_abstract_and_loopback_sockets_cannot_be_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "refused" in await run_script(sandbox, f"LC_ALL=C bash -c '</dev/tcp/127.0.0.1/{port}'")
    assert await run_script(sandbox, "tail -n +2 /proc/net/unix | wc -l") == "0\n"


async def test_loopback_works(sandbox: Sandbox) -> None:
    script = "ping -c1 -W1 127.0.0.1 > /dev/null; cat /proc/net/fib_trie | grep -c 127.0.0.1"
    assert int((await run_script(sandbox, script)).split()[-1]) > 0


async def test_a_default_route_makes_outside_addresses_time_out(shell_driver: BubblewrapDriver) -> None:
    script = "timeout 0.3 bash -c '</dev/tcp/192.0.2.1/80'; echo $?; grep -c '^lo.00000000' /proc/net/route"
    status, routes = (await run_with(shell_driver, SandboxSpec(default_route=True), script)).split()
    assert status == "124"  # `timeout` killed it: it was still trying
    assert routes == "1"


async def test_a_sandbox_resolves_its_own_names(shell_driver: BubblewrapDriver) -> None:
    spec = SandboxSpec(hostname="node7", uid=1234, workdir="/testbed/repo")
    output = await run_with(shell_driver, spec, "hostname; cat /etc/hostname; id -un; id -u; pwd; echo ~")
    assert output.split() == ["node7", "node7", "agent", "1234", "/testbed/repo", "/home/agent"]
    hosts = await run_with(shell_driver, spec, "cat /etc/hosts")
    assert "127.0.0.1 localhost node7" in hosts


async def test_programs_behind_alternatives_and_the_library_cache_work(sandbox: Sandbox) -> None:
    assert (
        await run_script(sandbox, "awk 'BEGIN { print 6 * 7 }'; test -e /etc/ld.so.cache && echo yes")
        == "42\nyes\n"
    )


async def test_orphans_are_reaped_and_do_not_stop_the_sandbox(sandbox: Sandbox) -> None:
    """An orphan's exit interrupts the first process; an unreaped zombie would count against its limits."""
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        for _ in range(20):
            await ask(sock, "(sh -c 'sleep 0.01' & sh -c 'true' &)")
        assert await ask(sock, "while grep -qsx sleep /proc/[0-9]*/comm; do :; done; echo alive") == "alive\n"
        assert (
            await ask(sock, "while grep -qs '^State:.Z' /proc/[0-9]*/status; do :; done; echo reaped")
            == "reaped\n"
        )
    assert sandbox.alive
