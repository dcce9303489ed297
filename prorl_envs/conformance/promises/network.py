"""What a sandbox can reach over sockets: itself, and nothing else."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prorl_envs.conformance import host
from prorl_envs.conformance.box import TIMEOUT_S, Box
from prorl_envs.conformance.host import marked
from prorl_envs.conformance.promise import NOT_LOCAL, PYTHON, Broken, Promises, expect, same
from prorl_envs.conformance.world import World
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import PROXY_PORT, Network

promises = Promises("network")

#: Connects to each address; prints those that can be reached.
_CONNECT = """
import socket
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as s:
        s.settimeout(2)
        try:
            s.connect(address)
            s.send(b"x")
        except OSError:
            return
        print("reached", address)
"""


def nobody_came(server: socket.socket) -> bool:
    """Whether no connection waits at a listening socket."""
    server.setblocking(False)
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return True
    return False


@promises.add("NET-001", "There is no route to anywhere but oneself.", exempt=NOT_LOCAL)
async def routes(world: World) -> None:
    await world.box.nothing(
        '{ read -r header; while read -r line; do echo "$line"; done; } < /proc/net/route'
    )


@promises.add("NET-002", "There is no interface of the host's.", exempt=NOT_LOCAL)
async def interfaces(world: World) -> None:
    script = "while read -r name rest; do case $name in *:*) echo ${name%%:*};; esac; done < /proc/net/dev"
    inside = set((await world.box.sh(script)).split())
    expect("lo" in inside, "there is no loopback")
    same(inside & ({"eth0", "docker0"} | host.interfaces()), set())


@promises.add(
    "NET-003",
    "An outside address cannot be reached, and the attempt fails at once.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def outside(world: World) -> None:
    await world.python_box.nothing_in_python("""
import socket
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET, "169.254.169.254"),
                        (socket.AF_INET6, "2001:db8::1")):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(family, kind) as s:
            s.settimeout(5)
            try:
                s.connect((address, 80))
            except socket.timeout:
                print(address, "timed out")
            except OSError:
                continue
            else:
                print(address, "has a route")
""")


@promises.add("NET-004", "The host's loopback cannot be reached.", needs=(PYTHON,), exempt=NOT_LOCAL)
async def host_loopback(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        await world.python_box.nothing_in_python(
            f"{_CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {port}))\n"
            f"connect(socket.AF_INET6, ('::ffff:127.0.0.1', {port}))"
        )
        expect(nobody_came(server), "somebody connected")


@promises.add(
    "NET-005", "The host's loopback cannot be reached from bash either.", needs=("bash",), exempt=NOT_LOCAL
)
async def host_loopback_bash(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = await world.box.sh(f"bash -c ': < /dev/tcp/127.0.0.1/{port} && echo reached'")
        expect("reached" not in text and nobody_came(server), "somebody connected")


@promises.add(
    "NET-006",
    "The host's abstract sockets can be neither seen nor reached.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def abstract(world: World) -> None:
    name = f"prorl-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        await world.box.nothing(
            f"while read -r line; do case $line in *{name}*) echo $line;; esac; done < /proc/net/unix"
        )
        await world.python_box.nothing_in_python(f"{_CONNECT}\nconnect(socket.AF_UNIX, '\\0{name}')")
        expect(nobody_came(server), "somebody connected")


@promises.add(
    "NET-007",
    "The host's sockets in files can be neither seen nor reached.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def paths(world: World) -> None:
    path = world.path / secrets.token_hex(4)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        known = [str(path), "/run/dbus/system_bus_socket", "/run/systemd/private", "/var/run/docker.sock"]
        await world.python_box.nothing_in_python(
            f"{_CONNECT}\nfor path in {known!r}: connect(socket.AF_UNIX, path)"
        )
        expect(nobody_came(server), "somebody connected")


_SERVE = """
import socket
inet, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
unix.bind("\\0{name}")
unix.listen()
with open("port.part", "w") as file:
    file.write(str(inet.getsockname()[1]))
import os
os.rename("port.part", "port")
while True:
    inet.accept()[0].close()
"""


@promises.add(
    "NET-008",
    "Loopback works inside, and leads to no other sandbox; nor do abstract sockets.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def between(world: World) -> None:
    name = f"prorl-{secrets.token_hex(8)}"
    async with world.fresh(python=True) as box:
        script = f"exec '{box.python}' -I -c \"$CODE\""
        code = _SERVE.replace("{name}", name)
        async with world.lingering(box, f"CODE='{code}'; {script}") as mark:
            await world.appears(box.sandbox.workspace / "port")
            port = (box.sandbox.workspace / "port").read_text()
            attempts = f"connect(socket.AF_INET, ('127.0.0.1', {port}))\nconnect(socket.AF_UNIX, '\\0{name}')"
            await world.python_box.nothing_in_python(f"{_CONNECT}\n{attempts}")
            own = await box.tools.run([box.python, "-I", "-c", f"{_CONNECT}\n{attempts}"], timeout_s=30)
            same(own.output.count(b"reached"), 2)
            expect(bool(marked(mark)), "the server ended")


@promises.add(
    "NET-009",
    "Raw sockets are refused, so that nobody's packets can be read or made up.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def raw(world: World) -> None:
    await world.python_box.nothing_in_python("""
import socket
for family, kind, protocol in ((17, 3, 0x300), (17, 2, 0x300), (2, 3, 1), (2, 3, 255), (10, 3, 58)):
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        continue
    print(family, kind, protocol)
""")


@promises.add(
    "NET-010",
    "Rare address families are refused, vsock (to the hypervisor) among them.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def families(world: World) -> None:
    await world.python_box.nothing_in_python("""
import socket
for family in range(1, 50):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(family, kind, 0).close()
        except OSError:
            continue
        if family not in (1, 2, 10, 16, 17):
            print(family, kind)
""")


@promises.add(
    "NET-011",
    "Interfaces, addresses and routes cannot be changed.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
    harmful=True,
)
async def change(world: World) -> None:
    await world.python_box.nothing_in_python("""
import fcntl, socket, struct
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFMTU = 0x8914, 0x8916, 0x8922
with socket.socket() as s:
    for request, data in (
        (SIOCSIFFLAGS, struct.pack("16sh", b"lo", 0)),
        (SIOCSIFMTU, struct.pack("16si", b"lo", 9000)),
        (SIOCSIFADDR, struct.pack("16sH2s4s8x", b"lo", 2, b"", socket.inet_aton("10.0.0.1")))):
        try:
            fcntl.ioctl(s, request, data.ljust(40, b"\\0"))
        except OSError:
            continue
        print("changed", hex(request))
""")


@promises.add(
    "NET-012",
    "With a default route, outside addresses time out instead of failing at once.",
    needs=(PYTHON,),
    exempt={**NOT_LOCAL, "instance": "refuses to start one, except as root: only root may add a route"},
)
async def default_route(world: World) -> None:
    async with world.fresh(python=True, default_route=True) as box:
        await box.nothing_in_python("""
import socket
with socket.socket() as s:
    s.settimeout(0.3)
    try:
        s.connect(("192.0.2.1", 80))
        print("connected")
    except socket.timeout:
        pass
""")


#: Asks the proxy for each target; prints the status of its answer, or of the server's behind it.
_ASK_PROXY = f"""
import socket
def ask(first, then=b""):
    with socket.create_connection(("127.0.0.1", {PROXY_PORT}), 20) as s:
        s.sendall(first.encode() + b"\\r\\n\\r\\n" + then)
        data = b""
        while more := s.recv(65536):
            data += more
        return data
"""


@asynccontextmanager
async def _web() -> AsyncIterator[int]:
    """A web server on the host's loopback; yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfrom outside")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@promises.add(
    "NET-013",
    "A host on the sandbox's allowlist is reached through the proxy, by request and by tunnel.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def listed(world: World) -> None:
    async with (
        _web() as port,
        world.fresh(python=True, network=Network(allow=(f"127.0.0.1:{port}",))) as box,
    ):
        await box.nothing_in_python(f"""{_ASK_PROXY}
get = b"GET / HTTP/1.1\\r\\n\\r\\n"
for answer in (ask("GET http://127.0.0.1:{port}/ HTTP/1.1"), ask("CONNECT 127.0.0.1:{port} HTTP/1.1", get)):
    if not answer.endswith(b"from outside"):
        print(answer)
""")


@promises.add(
    "NET-014",
    "The proxy refuses a host that is not on the allowlist with status 403.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def unlisted(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with world.fresh(python=True, network=Network(allow=("example.com", "127.0.0.1:1"))) as box:
            await box.nothing_in_python(f"""{_ASK_PROXY}
for host in ("127.0.0.1", "127.1", "localhost", "example.com.", "[::1]", "[::ffff:127.0.0.1]", "u@a.org"):
    for first in (f"GET http://{{host}}:{port}/ HTTP/1.1", f"CONNECT {{host}}:{port} HTTP/1.1"):
        answer = ask(first)
        if b" 403 " not in answer[:20]:
            print(first, answer)
""")
        expect(nobody_came(server), "somebody connected")


@promises.add(
    "NET-015",
    "An allowed name that leads to an address of the host's is refused.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def rebound(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with world.fresh(python=True, network=Network(allow=(f"localhost:{port}",))) as box:
            await box.nothing_in_python(f"""{_ASK_PROXY}
answer = ask("CONNECT localhost:{port} HTTP/1.1")
if b" 403 " not in answer[:20]:
    print(answer)
""")
        expect(nobody_came(server), "somebody connected")


@promises.add(
    "NET-016",
    "With an allowlist too, the proxy is the only way out, and no other sandbox's.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def only_way(world: World) -> None:
    async with (
        _web() as port,
        world.fresh(python=True, network=Network(allow=(f"127.0.0.1:{port}", "192.0.2.1"))) as box,
    ):
        await box.nothing_in_python(
            f"{_CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {port}))\n"
            "connect(socket.AF_INET, ('192.0.2.1', 80))"
        )
        await world.python_box.nothing_in_python(
            f"{_CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {PROXY_PORT}))"
        )


#: Greets each of its arguments, a port; prints what it is told, or why not.
_GREET = """
import socket, sys
for port in sys.argv[1:]:
    try:
        with socket.create_connection(("127.0.0.1", int(port)), 20) as s:
            s.sendall(b"hello from inside")
            print(s.makefile().readline(), end="")
    except ConnectionRefusedError:
        print("refused")
"""


@asynccontextmanager
async def _service(listener: socket.socket) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers whoever connects to a sandbox's listener; yields its port, and what it was told."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(100))
        writer.write(b"hello from outside\n")
        writer.close()

    async with await asyncio.start_server(answer, sock=listener):
        yield listener.getsockname()[1], heard


async def _greeted(box: Box, *ports: int) -> list[str]:
    argv = [box.python, "-I", "-c", _GREET, *map(str, ports)]
    done = await box.tools.run(argv, timeout_s=TIMEOUT_S)
    return done.output.decode(errors="replace").splitlines()


@promises.add(
    "NET-017",
    "A service of the host's can listen on the sandbox's own loopback, and is reached there.",
    needs=(PYTHON,),
)
async def service_inside(world: World) -> None:
    async with world.fresh(python=True) as box, _service(await box.sandbox.listen()) as (port, heard):
        same(await _greeted(box, port, port), ["hello from outside"] * 2)
        same(heard, [b"hello from inside"] * 2)


@promises.add(
    "NET-018",
    "Such a service is reached from no other sandbox, nor from the host.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def service_apart(world: World) -> None:
    async with (
        world.fresh(python=True) as box,
        world.fresh(python=True) as other,
        _service(await box.sandbox.listen()) as (port, heard),
        _service(await other.sandbox.listen()) as (second, told),
    ):
        same(await _greeted(other, second), ["hello from outside"])
        if port != second:
            same(await _greeted(other, port), ["refused"])
            with socket.socket() as outside:
                expect(outside.connect_ex(("127.0.0.1", port)) != 0, "the host reaches it")
        same((len(heard), len(told)), (0, 1))


@promises.add(
    "NET-019",
    "With such a service, nothing else of the host's can be reached.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def service_alone(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with world.fresh(python=True) as box, _service(await box.sandbox.listen()) as (port, _):
            same(await _greeted(box, port, server.getsockname()[1]), ["hello from outside", "refused"])
            await box.nothing_in_python(
                f"{_CONNECT}\nconnect(socket.AF_INET, ('192.0.2.1', 80))\n"
                f"connect(socket.AF_INET6, ('2001:db8::1', {port}))"
            )
        expect(nobody_came(server), "somebody connected")


@promises.add(
    "NET-020", "A sandbox that has ended has no loopback to listen on, and nobody comes by one it had."
)
async def service_of_the_dead(world: World) -> None:
    async with world.fresh() as box:
        sandbox, listener = box.sandbox, await box.sandbox.listen()
    with listener:
        expect(nobody_came(listener), "somebody connected")
    try:
        (await sandbox.listen()).close()
    except SandboxError:
        return
    raise Broken("it listens on something")
