"""Promises about sockets: a sandbox can connect only to itself."""

import os
import secrets
import socket

from prorl_envs.conformance.host import marked
from prorl_envs.conformance.promise import NOT_LOCAL, PYTHON, NotApplicable, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("network", exempt=NOT_LOCAL)

#: Connects to an address, and prints it if it can be reached.
CONNECT = """
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


def no_connection(server: socket.socket) -> bool:
    """Return True if no connection waits to be accepted by a listening socket."""
    server.setblocking(False)
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return True
    return False


promises.script(
    "NET-001",
    "There is no route out of the sandbox.",
    '{ read -r header; while read -r line; do echo "$line"; done; } < /proc/net/route',
)


promises.probe(
    "NET-003",
    "An outside address cannot be reached, and the attempt fails at once.",
    """
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
""",
)


@promises.add("NET-004", "The host's loopback cannot be reached.", needs=(PYTHON,))
async def host_loopback(world: PromiseContext) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        await world.python_box.nothing_in_python(
            f"{CONNECT}\nconnect(socket.AF_INET, ('127.0.0.1', {port}))\n"
            f"connect(socket.AF_INET6, ('::ffff:127.0.0.1', {port}))"
        )
        expect(no_connection(server), "a connection was accepted")


@promises.add("NET-006", "The host's abstract sockets can be neither seen nor reached.", needs=(PYTHON,))
async def abstract(world: PromiseContext) -> None:
    name = f"prorl-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        await world.box.nothing(
            f"while read -r line; do case $line in *{name}*) echo $line;; esac; done < /proc/net/unix"
        )
        await world.python_box.nothing_in_python(f"{CONNECT}\nconnect(socket.AF_UNIX, '\\0{name}')")
        expect(no_connection(server), "a connection was accepted")


@promises.add("NET-007", "The host's sockets in files can be neither seen nor reached.", needs=(PYTHON,))
async def paths(world: PromiseContext) -> None:
    path = world.path / secrets.token_hex(4)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        known = [str(path), "/run/dbus/system_bus_socket", "/run/systemd/private", "/var/run/docker.sock"]
        await world.python_box.nothing_in_python(
            f"{CONNECT}\nfor path in {known!r}: connect(socket.AF_UNIX, path)"
        )
        expect(no_connection(server), "a connection was accepted")


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
)
async def between(world: PromiseContext) -> None:
    name = f"prorl-{secrets.token_hex(8)}"
    async with world.fresh(python=True) as box:
        script = f"exec '{box.python}' -I -c \"$CODE\""
        code = _SERVE.replace("{name}", name)
        async with world.lingering(box, f"CODE='{code}'; {script}") as mark:
            await world.appears(box.sandbox.workspace / "port")
            port = (box.sandbox.workspace / "port").read_text()
            attempts = f"connect(socket.AF_INET, ('127.0.0.1', {port}))\nconnect(socket.AF_UNIX, '\\0{name}')"
            await world.python_box.nothing_in_python(f"{CONNECT}\n{attempts}")
            inside = await box.tools.run([box.python, "-I", "-c", f"{CONNECT}\n{attempts}"], timeout_s=30)
            same(inside.output.count(b"reached"), 2)
            expect(bool(marked(mark)), "the server ended")


promises.probe(
    "NET-009",
    "Raw sockets are refused, so that packets of others can be neither read nor forged.",
    """
import socket
for family, kind, protocol in ((17, 3, 0x300), (17, 2, 0x300), (2, 3, 1), (2, 3, 255), (10, 3, 58)):
    try:
        socket.socket(family, kind, protocol).close()
    except OSError:
        continue
    print(family, kind, protocol)
""",
)


promises.probe(
    "NET-011",
    "Interfaces, addresses and routes cannot be changed.",
    """
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
""",
    harmful=True,
)


@promises.add(
    "NET-012", "With a default route, outside addresses time out instead of failing at once.", needs=(PYTHON,)
)
async def default_route(world: PromiseContext) -> None:
    if world.subject.driver == "apptainer-instance" and os.geteuid() != 0:
        raise NotApplicable("only root may add a route; the driver refuses to start such a sandbox")
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
