"""Promises about an emulated root: its calls succeed, and it has no more power than an ordinary user.

With `--emulate-root`, all other promises are tested with an emulated root as well.
"""

import os

from prorl_envs.conformance.promise import EMULATED_ROOT, IMAGE, NOT_LOCAL, PYTHON, Promises, expect, same
from prorl_envs.conformance.promises.filesystems import digest
from prorl_envs.conformance.promises.privileges import BARE, STATUS, parsed
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.linux.syscall_wrappers import ROOT_CAPABILITIES

promises = Promises("emulated root", exempt=NOT_LOCAL)

_NEEDS = (EMULATED_ROOT, PYTHON)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@promises.add(
    "ROOT-001",
    "Commands have the two capabilities over the sandbox's own files and no other, and can gain none.",
    needs=(EMULATED_ROOT, "bash", "chmod"),
)
async def capabilities(world: PromiseContext) -> None:
    mask = f"{ROOT_CAPABILITIES:016x}"
    promised = {**BARE, **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd"), mask)}
    async with world.fresh() as box:
        for script in (
            STATUS,
            f"cp=$(command -v bash); cat $cp > own; chmod 6755 own; ./own -c '{STATUS}'",
        ):
            same(parsed(await box.sh(script)), promised)


promises.probe(
    "ROOT-002",
    "Changing owners, users and attributes reports success and changes nothing.",
    """
os.chdir(os.environ["HOME"])
open("own", "w").close()
before = os.stat("own")
for name, *arguments in (
    ("chown", b"own", 33, 33),
    ("lchown", b"own", 33, 33),
    ("fchownat", -100, b"own", 33, 33, 0),
    ("setxattr", b"own", b"security.capability", bytes(20), 20, 0),
    ("setgroups", 1, (ctypes.c_uint * 1)(33)),
    ("setresgid", 33, 33, 33),
    ("setresuid", 33, 33, 33),
    ("setuid", 33),
    ("setgid", 33),
):
    result, error = attempt(getattr(c, name), *arguments)
    if result != 0:
        print(name, "failed with", os.strerror(error))
after = os.stat("own")
if (after.st_uid, after.st_gid) != (before.st_uid, before.st_gid) or os.getresuid() != (0, 0, 0):
    print("it had an effect")
if os.listxattr("own"):
    print("it has attributes", os.listxattr("own"))
""",
    needs=(EMULATED_ROOT,),
)

promises.probe(
    "ROOT-003",
    "Creating a device reports success and creates none; a pipe is created.",
    """
os.chdir(os.environ["HOME"])
for mode in (0o20666, 0o60666):
    result, error = attempt(c.mknod, b"device", mode, ctypes.c_ulong(0x103))
    if result != 0 or os.path.exists("device"):
        print("mknod", oct(mode), result, os.path.exists("device"))
os.mkfifo("pipe")
""",
    needs=(EMULATED_ROOT,),
)


@promises.add(
    "ROOT-004",
    "The whole image can be changed, read-only files too, and the image on the host stays as it is.",
    needs=(EMULATED_ROOT, IMAGE, "chmod", "rm", "mv"),
)
async def all_of_it(world: PromiseContext) -> None:
    assert world.subject.image is not None
    before = digest(world.subject.image)
    async with world.fresh() as box:
        same(
            await box.sh(
                "echo x > /etc/made; chmod 0 /etc/made; echo y > /etc/made; read -r x < /etc/made; echo $x; "
                "mv /etc/passwd /etc/moved && rm /etc/moved; mkdir /new && echo > /new/file; "
                "[ -e /etc/passwd ] || echo gone"
            ),
            "y\ngone",
        )
    same(digest(world.subject.image), before)


promises.probe(
    "ROOT-005",
    "It can listen on any port of the sandbox's own network.",
    """
import socket
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 80))
    sock.listen()
""",
    needs=(EMULATED_ROOT,),
)


@promises.add("ROOT-006", "The host's devices keep their modes, owners, attributes and times.", needs=_NEEDS)
async def devices(world: PromiseContext) -> None:
    before = _devices()
    await world.python_box.nothing_in_python(f"""
for name in {_DEVICES}:
    for call in (
        lambda path: os.chmod(path, 0o777),
        lambda path: os.chown(path, 33, 33),
        lambda path: os.utime(path, (1, 1)),
        lambda path: os.setxattr(path, "user.x", b"1"),
    ):
        try:
            call("/dev/" + name)
        except OSError:
            pass
""")
    same(_devices(), before)


promises.probe(
    "ROOT-007",
    "A changed root directory leads to no file outside the sandbox.",
    """
os.chdir(os.environ["HOME"])
os.mkdir("jail")
outside = os.stat("/")
root_fd = os.open("/", os.O_RDONLY)
os.chroot("jail")
os.fchdir(root_fd)
for _ in range(100):
    os.chdir("..")
os.chroot(".")
found = os.stat("/")
if (found.st_dev, found.st_ino) != (outside.st_dev, outside.st_ino):
    print("another root directory")
""",
    needs=(EMULATED_ROOT,),
)


@promises.add(
    "ROOT-008",
    "The files of host names can be changed, and no other sandbox sees the change.",
    needs=(EMULATED_ROOT,),
)
async def names(world: PromiseContext) -> None:
    async with world.fresh(hostname="first") as one, world.fresh(hostname="second") as two:
        await one.sh("echo 127.0.0.1 invented >> /etc/hosts")
        read = "while read -r _ names; do echo $names; done < /etc/hosts; read -r x < /etc/hostname; echo $x"
        found, others = await one.sh(read), await two.sh(read)
        expect("invented" in found and found.endswith("first"), f"found {found!r}")
        expect("invented" not in others and others.endswith("second"), f"found {others!r}")


def _devices() -> list[tuple[object, ...]]:
    """Return the state of the host's devices. Their times change by use, but not to the tested value."""
    paths = [f"/dev/{name}" for name in _DEVICES]
    found = [(os.stat(path), os.listxattr(path)) for path in paths]  # noqa: PTH116
    return [(s.st_mode, s.st_uid, s.st_gid, s.st_mtime == 1, attributes) for s, attributes in found]
