"""Sandboxes with a network: the proxy with an allowlist, and the host's network."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import PROXY_PORT, Network, Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.filesystem.mount_plan import check
from tests.support.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

pytestmark = pytest.mark.anyio

RESOLV_CONF = Path("/etc/resolv.conf").read_text()
OWN_NETWORK = str(Path("/proc/self/ns/net").readlink())


@asynccontextmanager
async def web() -> AsyncIterator[int]:
    """Web server on the host's loopback that answers with the first line of the request. Yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the connection sent no request
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ngot " + head.split(b"\r\n")[0] + b"\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def started(driver: BubblewrapDriver, *allow: str, **fields: object) -> AsyncIterator[Sandbox]:
    sandbox = await driver.start(SandboxSpec(network=Network(allow=allow), **fields))  # type: ignore[arg-type]
    try:
        yield sandbox
    finally:
        await sandbox.close()


def through_proxy(*lines: str, port: int = PROXY_PORT) -> str:
    """Return a one-line script that sends these lines to the proxy and prints the whole answer."""
    text = "".join(f"{line}\\r\\n" for line in lines)
    return f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}; printf \"{text}\" >&3; cat <&3'"


async def test_a_listed_host_is_reached_through_the_proxy(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, f"127.0.0.1:{port}") as sandbox:
        output = await run_script(
            sandbox, through_proxy(f"GET http://127.0.0.1:{port}/x?y HTTP/1.1", "A: b", "")
        )
        assert output.splitlines()[-1] == "got GET /x?y HTTP/1.1"


async def test_an_unlisted_host_is_refused_with_a_reason(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, "example.com") as sandbox:
        for request in (f"GET http://127.0.0.1:{port}/ HTTP/1.1", f"CONNECT 127.0.0.1:{port} HTTP/1.1"):
            first, *_, last = (await run_script(sandbox, through_proxy(request, ""))).splitlines()
            assert first.startswith("HTTP/1.1 403 Forbidden: ")
            assert last == f"127.0.0.1:{port} is not on the allowlist of this sandbox"


async def test_an_unlisted_name_of_a_listed_address_is_refused(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, f"127.0.0.1:{port}", f"[::1]:{port}") as sandbox:
        for host in ("localhost", "127.1", "[::ffff:127.0.0.1]", "u@127.0.0.1"):
            for target in (f"GET http://{host}:{port}/", f"CONNECT {host}:{port}"):
                answer = await run_script(sandbox, through_proxy(f"{target} HTTP/1.1", ""))
                assert " 403 " in answer[:20], (target, answer)


async def test_a_tunnel_carries_bytes_both_ways(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, f"127.0.0.1:{port}") as sandbox:
        output = await run_script(
            sandbox, through_proxy(f"CONNECT 127.0.0.1:{port} HTTP/1.1", "", "GET /inside HTTP/1.1", "")
        )
        assert output.startswith("HTTP/1.1 200 Connection established")
        assert output.endswith("got GET /inside HTTP/1.1\n")


async def test_the_proxy_cannot_be_bypassed(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, f"127.0.0.1:{port}", "192.0.2.1") as sandbox:
        for address, error in ((f"127.0.0.1/{port}", "refused"), ("192.0.2.1/80", "unreachable")):
            assert error in await run_script(sandbox, f"LC_ALL=C bash -c '</dev/tcp/{address}' 2>&1")
        interfaces = await run_script(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")
        assert interfaces.split() == ["lo"]


async def test_without_an_allowlist_there_is_no_proxy(shell_driver: BubblewrapDriver) -> None:
    async with started(shell_driver) as sandbox:
        output = await run_script(sandbox, f"LC_ALL=C bash -c '</dev/tcp/127.0.0.1/{PROXY_PORT}'; env")
        assert "refused" in output
        assert "proxy" not in output.lower()


async def test_the_environment_names_the_proxy_unless_the_spec_does(shell_driver: BubblewrapDriver) -> None:
    env = {"https_proxy": "http://other:1", "NO_PROXY": "*"}
    async with started(shell_driver, "example.com", env=env) as sandbox:
        lines = (await run_script(sandbox, "env | grep -i proxy | sort")).splitlines()
    own = f"http://127.0.0.1:{PROXY_PORT}"
    assert dict(line.split("=", 1) for line in lines) == {
        "http_proxy": own,
        "https_proxy": "http://other:1",
        "HTTP_PROXY": own,
        "HTTPS_PROXY": own,
        "no_proxy": "localhost,127.0.0.1,::1",
        "NO_PROXY": "*",
    }


async def test_no_process_inside_can_impersonate_the_proxy(shell_driver: BubblewrapDriver) -> None:
    """One sandbox cannot use another's proxy either."""
    async with started(shell_driver, "example.com") as sandbox, started(shell_driver) as other:
        listening = await run_script(sandbox, "grep -c ' 0A ' /proc/net/tcp; cat /proc/[0-9]*/stat")
        sockets, *processes = listening.splitlines()
        names = {line.partition("(")[2].rpartition(")")[0] for line in processes}
        assert sockets == "1" and names <= {"sandbox", "cat", "sh"}
        connecting = f"LC_ALL=C bash -c '</dev/tcp/127.0.0.1/{PROXY_PORT}'"
        assert "refused" in await run_script(other, connecting)


async def test_the_proxy_stops_with_the_sandbox_and_its_connections(own_driver: BubblewrapDriver) -> None:
    connected = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        assert await reader.read() == b""
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, started(own_driver, f"127.0.0.1:{port}") as sandbox:
        with await sandbox.spawn(RUN_SCRIPTS) as sock:
            script = through_proxy(f"CONNECT 127.0.0.1:{port} HTTP/1.1", "")
            asking = asyncio.create_task(ask(sock, script))
            await connected.wait()
            await sandbox.close()
            await ended.wait()
            with contextlib.suppress(EOFError):  # its last bytes may still have arrived
                await asking


async def test_a_cancelled_start_leaks_nothing(own_driver: BubblewrapDriver) -> None:
    """The leak fixture checks descriptors and processes."""
    await own_driver.warm()
    for steps in range(0, 60, 3):
        start = asyncio.create_task(own_driver.start(SandboxSpec(network=Network(allow=("example.com",)))))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        outcome = (await asyncio.gather(start, return_exceptions=True))[0]
        if not isinstance(outcome, BaseException):
            await outcome.close()


async def test_an_open_network_is_the_hosts(
    shell_driver: BubblewrapDriver, caplog: pytest.LogCaptureFixture
) -> None:
    async with web() as port:
        sandbox = await shell_driver.start(SandboxSpec(network=Network(open=True, reason="a test")))
        try:
            script = through_proxy("GET / HTTP/1.1", "", port=port)
            assert (await run_script(sandbox, script)).endswith("got GET / HTTP/1.1\n")
            assert await run_script(sandbox, "cat /etc/resolv.conf") == RESOLV_CONF
            namespaces = await run_script(
                sandbox, "readlink /proc/self/ns/net; grep CapEff /proc/self/status"
            )
        finally:
            await sandbox.close()
    assert namespaces.split() == [OWN_NETWORK, "CapEff:", "0000000000000000"]
    assert "access to the host's whole network: a test" in caplog.text


@pytest.mark.parametrize(
    "spec",
    [
        SandboxSpec(network=Network(open=True, allow=("a.example",))),
        SandboxSpec(network=Network(open=True), default_route=True),
        SandboxSpec(network=Network(allow=("http://a.example",))),
        SandboxSpec(network=Network(allow="a.example")),  # type: ignore[arg-type]
    ],
)
def test_contradictory_network_settings_are_refused(spec: SandboxSpec) -> None:
    with pytest.raises(SandboxError):
        check(spec)


async def test_the_local_driver_refuses_an_allowlist(run_dir: Path) -> None:
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver(templates=SCRIPT_TEMPLATES)
    with pytest.raises(SandboxError, match="allowlist"):
        await driver.start(SandboxSpec(network=Network(allow=("example.com",))))
    await driver.aclose()


async def test_a_default_route_and_an_allowlist_can_be_combined(shell_driver: BubblewrapDriver) -> None:
    async with web() as port, started(shell_driver, f"127.0.0.1:{port}", default_route=True) as sandbox:
        output = await run_script(sandbox, through_proxy(f"GET http://127.0.0.1:{port}/ HTTP/1.1", ""))
        assert output.endswith("got GET / HTTP/1.1\n")
        assert await run_script(sandbox, "timeout 0.2 bash -c '</dev/tcp/192.0.2.1/80'; echo $?") == "124\n"


async def test_a_flood_from_one_sandbox_does_not_affect_the_others(shell_driver: BubblewrapDriver) -> None:
    """The sandbox gets as many connections as its proxy has slots; further connections wait in the kernel."""
    one = f"exec {{fd}}<>/dev/tcp/127.0.0.1/{PROXY_PORT}"
    flood = f"timeout 1 bash -c 'for i in {{1..1000}}; do {one} || break; done; echo all'; echo end"
    free = least = shell_driver.gateway.free
    async with (
        web() as port,
        started(shell_driver, "example.com") as hostile,
        started(shell_driver, f"127.0.0.1:{port}") as sandbox,
    ):
        with await hostile.spawn(RUN_SCRIPTS) as sock:
            asking = asyncio.create_task(ask(sock, flood))
            get = through_proxy(f"GET http://127.0.0.1:{port}/ HTTP/1.1", "")
            while not asking.done():
                assert (await run_script(sandbox, get)).endswith("got GET / HTTP/1.1\n")
                least = min(least, shell_driver.gateway.free)
            assert (await asking).endswith("end\n")
    assert least <= free - shell_driver.gateway.limits.connections
