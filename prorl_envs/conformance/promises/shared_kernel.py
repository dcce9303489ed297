"""Promises about kernel resources shared by a user or the machine: no sandbox changes or exhausts them."""

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.conformance.host import eventually
from prorl_envs.conformance.promise import NOT_LOCAL, ORDINARY, PYTHON, NotApplicable, Promises, expect, same
from prorl_envs.conformance.promises.kernel import calls
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.base import SandboxLimits

promises = Promises("the shared kernel", exempt=NOT_LOCAL)

_MEGABYTE = 1 << 20
#: Memory limit of a sandbox that tries to exceed it with System V memory.
_MEMORY_BYTES = 256 * _MEGABYTE
#: From this Linux version on, the settings of an ipc namespace belong to the user who created it.
_IPC_SETTINGS_VERSION = (6, 10)

_DEVICES = """
import stat
devices = [path for path in map("/dev/{}".format, os.listdir("/dev")) if stat.S_ISCHR(os.lstat(path).st_mode)]
def unchanged(what, call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return
    print(what, arguments)
"""


def check_instance(world: PromiseContext) -> None:
    """Raise NotApplicable if the driver `apptainer-instance` cannot limit resources of its namespaces."""
    if world.subject.driver == "apptainer-instance" and (os.geteuid() != 0 or "user" in world.shared):
        raise NotApplicable("only root's Apptainer has a user namespace and capabilities in it")


@asynccontextmanager
async def holding(world: PromiseContext, code: str) -> AsyncIterator[int]:
    """Start a sandbox in which Python code holds resources; yield its variable `count`."""
    async with world.fresh(python=True) as box:
        end = "open('new', 'w').write(str(count)); os.rename('new', 'count'); signal.pause()"
        text = f"import ctypes, os, signal\nc = ctypes.CDLL(None, use_errno=True)\n{code}\n{end}"
        holder = asyncio.ensure_future(box.tools.run([box.python, "-I", "-c", text], timeout_s=60))
        try:
            path = box.sandbox.workspace / "count"
            await eventually(lambda: path.exists() or holder.done())
            expect(not holder.done(), "the probe ended")
            yield int(path.read_text())
        finally:
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)


promises.probe(
    "KERN-001",
    "The mode, owner and attributes of no device can be changed.",
    f"""{_DEVICES}
for path in devices:
    found = os.stat(path)
    unchanged("chmod", os.chmod, path, stat.S_IMODE(found.st_mode))
    unchanged("chown", os.chown, path, found.st_uid, found.st_gid)
    unchanged("setxattr", os.setxattr, path, "user.x", b"1")
    unchanged("utime", os.utime, path, (1, 1))
""",
    needs=(ORDINARY,),
)


@promises.add(
    "KERN-002",
    "Devices are mounted read-only, so that not even their times change, and can be written.",
    needs=(ORDINARY, PYTHON),
)
async def devices(world: PromiseContext) -> None:
    check_instance(world)
    await world.python_box.nothing_in_python(f"""{_DEVICES}
for path in devices:
    unchanged("utime", os.utime, path)
    unchanged("chown", os.chown, path, -1, -1)
with open("/dev/null", "wb") as null, open("/dev/zero", "rb") as zero:
    null.write(zero.read(10))
""")


@promises.add(
    "KERN-003",
    "A sandbox that takes all the pseudo-terminals it can leaves enough for others.",
    needs=(PYTHON, "bash"),
)
async def terminals(world: PromiseContext) -> None:
    check_instance(world)
    code = """
terminals = []
try:
    while len(terminals) < 200:
        terminals.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
count = len(terminals)
"""
    async with holding(world, code) as count, world.fresh() as other:
        expect(count <= 64, f"it took {count}")
        same((await other.bash("echo works")).text, "works\n")


promises.probe(
    "KERN-004",
    "No lease can be taken on a file, and no directory watched by signals.",
    """
import fcntl
open(os.environ["HOME"] + "/own", "w").close()
for path in (os.environ["HOME"] + "/own", sys.executable, "/bin/sh"):
    file = os.open(path, os.O_RDONLY)
    for name, command in {"lease": 1024, "delegation": 1040}.items():
        for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            try:
                fcntl.fcntl(file, command, kind)
            except OSError:
                continue
            print(name, kind, path)
try:
    fcntl.fcntl(os.open("/", os.O_RDONLY), 1026, 0x2)
except OSError:
    pass
else:
    print("/ is watched")
""",
)
promises.probe(
    "KERN-005",
    "Both calls that create sockets refuse rare address families, Internet protocols and netlink families, "
    "vsock (to the hypervisor) among them.",
    """
import socket
refusals = (errno.EAFNOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EPROTONOSUPPORT)
refused = [(family, type_, 0) for family in {*range(1, 50)} - {1, 2, 10, 16} for type_ in (1, 2, 3, 5)]
refused += [(family, type_, 0) for family in (2, 10) for type_ in (4, 5, 6, 10)]
refused += [(family, 1, number) for family in (2, 10) for number in (33, 115, 132, 136, 256, 262)]
refused += [(16, 3, number) for number in (2, 6, 9, 11, 12, 15, 16, 21)]
pair = (ctypes.c_int * 2)()
for arguments in refused:
    for name, more in (("socket", ()), ("socketpair", (pair,))):
        result, error = attempt(getattr(c, name), *arguments, *more)
        if error not in refusals:
            print(name, arguments, result, errno.errorcode.get(error))
for arguments in ((1, 1, 0), (1, 5, 0), (2, 1, 0), (2, 1, 6), (10, 2, 17), (16, 3, 0), (16, 2, 4)):
    socket.socket(*arguments).close()
for end in socket.socketpair():
    end.close()
""",
)
promises.probe(
    "KERN-006",
    "The line discipline of no terminal can be changed.",
    """
import fcntl
try:
    fcntl.ioctl(os.openpty()[1], 0x5423, bytes(4))
except OSError:
    pass
else:
    print("it was changed")
""",
)
promises.probe(
    "KERN-007",
    "Kernel AIO, fanotify, quotas, secret memory, larger pipes and pages lent to pipes are closed.",
    calls(("io_setup", "fanotify_init", "quotactl", "quotactl_fd", "memfd_secret", "vmsplice"))
    # Without a filter, the kernel creates a group with these arguments; with invalid ones it answers EPERM.
    + """
if attempt(c.fanotify_init, 0x200, 0)[0] >= 0:
    print("fanotify_init")
if attempt(c.fcntl, os.pipe()[1], 1031, 1 << 20)[0] >= 0:
    print("a larger pipe")
""",
)

_INOTIFY = "count = 0\nwhile count < 4096 and c.inotify_init1(0) >= 0:\n    count += 1\n"


@promises.add(
    "KERN-008",
    "A sandbox that takes all the inotify instances it can leaves enough for others.",
    needs=(PYTHON,),
)
async def inotify(world: PromiseContext) -> None:
    check_instance(world)
    libc = ctypes.CDLL(None, use_errno=True)
    async with holding(world, _INOTIFY) as count:
        expect(count > 0, "it has none")
        instance = libc.inotify_init1(os.O_CLOEXEC)
        expect(instance >= 0, f"it took {count}, and none is left for the host")
        os.close(instance)
        await world.python_box.nothing_in_python("if c.inotify_init1(0) < 0: print('none is left')")
        expect(count <= _inotify_limit() // 4, f"it took {count} of {_inotify_limit()}")


@promises.add(
    "KERN-009",
    "Memory, semaphores and queues of System V, which outlive every process, are limited per sandbox.",
    needs=(PYTHON,),
)
async def system_v(world: PromiseContext) -> None:
    check_instance(world)
    if os.geteuid() != 0 and _kernel_version() < _IPC_SETTINGS_VERSION:
        raise NotApplicable("before Linux 6.10 only root can set the bounds of System V")
    async with world.fresh(python=True, limits=SandboxLimits(memory_bytes=_MEMORY_BYTES)) as box:
        await box.nothing_in_python(f"""
segments = sets = queues = 0
while segments < 300 and c.shmget(0, {_MEGABYTE}, 0o1600) >= 0:
    segments += 1
while sets < 300 and c.semget(0, 250, 0o1600) >= 0:
    sets += 1
while queues < 300 and c.msgget(0, 0o1600) >= 0:
    queues += 1
if not 0 < segments <= {_MEMORY_BYTES // _MEGABYTE} or not 0 < sets < 300 or not 0 < queues < 300:
    print(segments, "MB,", sets, "sets of semaphores,", queues, "queues")
""")


_MQ = """
library = c if hasattr(c, "mq_open") else ctypes.CDLL("librt.so.1", use_errno=True)
count = 0
while count < 300 and library.mq_open(b"/%d" % count, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0:
    count += 1
"""


@promises.add(
    "KERN-010",
    "A sandbox that takes all the POSIX message queues it can leaves enough for others.",
    needs=(PYTHON,),
)
async def message_queues(world: PromiseContext) -> None:
    check_instance(world)
    async with holding(world, _MQ) as first, holding(world, _MQ) as second:
        expect(0 < first < 8 and second == first, f"it took {first}, and another sandbox then {second}")


def _inotify_limit() -> int:
    return int(Path("/proc/sys/user/max_inotify_instances").read_text())


def _kernel_version() -> tuple[int, ...]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)))
