"""Promises about privileges that the kernel refuses to a sandbox. Each request is tested."""

import ctypes
import secrets

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import NOT_LOCAL, ORDINARY, PYTHON, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("privileges", exempt=NOT_LOCAL)

#: Prints the capabilities and filters of a process, for `parsed`.
STATUS = (
    "while read -r name value; do case $name in Cap*|NoNewPrivs:|Seccomp:) echo $name$value;; esac; "
    "done < /proc/self/status"
)
_NONE = "0000000000000000"
#: Parsed output for a process without privileges.
BARE = {
    "CapInh": _NONE,
    "CapPrm": _NONE,
    "CapEff": _NONE,
    "CapBnd": _NONE,
    "CapAmb": _NONE,
    "NoNewPrivs": "1",
    "Seccomp": "2",
}


def parsed(status: str) -> dict[str, str]:
    """Parse the fields that `STATUS` prints."""
    return dict(line.split(":", 1) for line in status.splitlines())


@promises.add(
    "PRIV-001",
    "A command has no capability, cannot gain any, and its system calls are filtered.",
    needs=(ORDINARY,),
)
async def bare(world: PromiseContext) -> None:
    same(parsed(await world.box.sh(STATUS)), BARE)


@promises.fresh(
    "PRIV-002", "The same holds for a command that is root inside.", needs=(ORDINARY,), fields={"uid": 0}
)
async def bare_root(box: Probe) -> None:
    same(parsed(await box.sh(STATUS)), BARE)


@promises.fresh(
    "PRIV-004", "A program's set-user-id bit gives no privilege.", needs=(ORDINARY, "chmod", "cat")
)
async def set_user_id(box: Probe) -> None:
    script = (
        'cp=$(command -v cat); cat "$cp" > own; chmod 6755 own; '
        "./own /proc/self/status > status; for f in /usr/bin/su /usr/bin/mount /bin/su /bin/mount; do "
        "[ -u $f ] && $f --version >/dev/null; done; "
        "while read -r name value; do "
        "case $name in CapEff:|NoNewPrivs:) echo $value;; esac; done < status"
    )
    same((await box.sh(script)).split()[-2:], [_NONE, "1"])


promises.probe(
    "PRIV-005",
    "No process can become another user.",
    """
for name in ("setuid", "setgid", "seteuid", "setegid"):
    refused(name, 12345)
refused("setresuid", 12345, 12345, 12345)
refused("setgroups", 1, (ctypes.c_uint * 1)(12345))
""",
    needs=(ORDINARY,),
)


@promises.add(
    "PRIV-019", "No process can type into a terminal, not even into its own.", needs=(PYTHON, "bash")
)
async def typing(world: PromiseContext) -> None:
    code = """
import fcntl
for request, data in ((0x5412, b"\\n"), (0x541C, b"\\x02" + bytes(16))):
    try:
        fcntl.ioctl(0, request, data)
    except OSError:
        continue
    print("typed by", hex(request))
print("end")
"""
    async with world.fresh(python=True) as box:
        result = await box.bash(f"{box.python} -I -c '{code}' < /dev/tty")
        same(result.text, "end\n")


promises.script(
    "PRIV-023",
    "No process can avoid being killed if memory runs out.",
    "( echo -1000 > /proc/self/oom_score_adj ) && echo lowered",
)


@promises.add("PRIV-024", "Limits cannot be raised, and no core file is written.", exempt={})
async def limits(world: PromiseContext) -> None:
    script = (
        "ulimit -S -c; ulimit -H -c; hard=$(ulimit -H -n); "
        "ulimit -H -n $((hard + 1)) 2>/dev/null && echo raised; echo end"
    )
    core, hard_core, *rest = (await world.box.sh(script)).splitlines()
    same((core, hard_core), ("0", "0"))
    if world.is_isolated:
        same(rest, ["end"])


promises.probe(
    "PRIV-025",
    "No process can raise its priority.",
    """
refused("nice", -5)
refused("setpriority", 0, 0, -10)
refused("sched_setscheduler", 0, 1, ctypes.byref(ctypes.c_int(1)))
""",
)


@promises.add(
    "PRIV-027", "The host's shared memory and queues can be neither seen nor attached.", needs=(PYTHON,)
)
async def ipc(world: PromiseContext) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(2**30) + 1
    segment = libc.shmget(key, 4096, 0o1666)
    expect(segment >= 0, "the host could not create a segment")
    try:
        await world.python_box.nothing_in_python(
            f"refused('shmget', {key}, 0, 0); refused('shmat', {segment}, None, 0)"
        )
        await world.box.nothing("{ read -r header; while read -r l; do echo $l; done; } < /proc/sysvipc/shm")
    finally:
        libc.shmctl(segment, 0, None)


@promises.add(
    "PRIV-029",
    "A sandbox cannot take over files of other users, or give its own files to them.",
    harmful=True,
    needs=(ORDINARY, PYTHON),
)
async def owners(world: PromiseContext) -> None:
    await world.python_box.nothing_in_python("""
os.chdir(os.environ["HOME"])
open("own", "w").close()
refused("chown", b"own", 12345, 12345)
for path in (b"/etc", b"/bin", b"/proc/1/status"):
    if os.stat(path).st_uid != os.getuid():
        refused("chown", path, os.getuid(), os.getgid())
refused("setxattr", b"own", b"security.capability", bytes(20), 20, 0)
refused("setxattr", b"own", b"trusted.x", b"x", 1, 0)
""")
