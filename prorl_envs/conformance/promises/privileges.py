"""What a sandbox may not ask of the kernel. Each is asked for, and the outcome looked at."""

import ctypes
import os
import secrets

from prorl_envs.conformance.promise import NO_IMAGE, NOT_LOCAL, PYTHON, Promises, Untried, expect, same
from prorl_envs.conformance.promises.filesystems import WRITE
from prorl_envs.conformance.world import World
from prorl_envs.sandbox.seccomp import ARCHITECTURES

promises = Promises("privileges")

_STATUS = (
    "while read -r name value; do case $name in Cap*|NoNewPrivs:|Seccomp:) echo $name$value;; esac; "
    "done < /proc/self/status"
)
_NONE = "0000000000000000"
_BARE = {
    "CapInh": _NONE,
    "CapPrm": _NONE,
    "CapEff": _NONE,
    "CapBnd": _NONE,
    "CapAmb": _NONE,
    "NoNewPrivs": "1",
    "Seccomp": "2",
}


#: The number of `clone`, which the C library wraps too much.
_CLONE = {"x86_64": 56, "aarch64": 220}


def parsed(status: str) -> dict[str, str]:
    """The fields that `_STATUS` prints."""
    return dict(line.split(":", 1) for line in status.splitlines())


def probe(id_: str, text: str, code: str, *, harmful: bool = False) -> None:
    """Promise that a probe in Python prints nothing."""

    async def keep(world: World) -> None:
        if not code:
            raise Untried(f"not written for {os.uname().machine}")
        await world.python_box.nothing_in_python(code)

    promises.add(id_, text, needs=(PYTHON,), exempt=NOT_LOCAL, harmful=harmful)(keep)


def calls(names: tuple[str, ...]) -> str:
    """Python that makes system calls with arguments that are wrong, and prints those not refused.

    A call that exists complains of its arguments; one that is refused does so before it looks at them.
    """
    architecture = ARCHITECTURES.get(os.uname().machine)
    if architecture is None:
        return ""
    numbers = {name: {**architecture.refused, **architecture.absent}.get(name) for name in names}
    return f"""
for name, number in {numbers!r}.items():
    result, error = attempt(c.syscall, ctypes.c_long(number), ctypes.c_long(-1), ctypes.c_long(-1), 0, 0, 0)
    if error not in (errno.EPERM, errno.ENOSYS):
        print(name, result, errno.errorcode.get(error, error))
"""


@promises.add(
    "PRIV-001",
    "A command has no capability, cannot gain any, and its system calls are filtered.",
    exempt=NOT_LOCAL,
)
async def bare(world: World) -> None:
    same(parsed(await world.box.sh(_STATUS)), _BARE)


@promises.add("PRIV-002", "The same holds of a command that is root inside.", exempt=NOT_LOCAL)
async def bare_root(world: World) -> None:
    async with world.fresh(uid=0) as box:
        same(parsed(await box.sh(_STATUS)), _BARE)


@promises.add("PRIV-003", "The same holds of the persistent shell.", exempt=NOT_LOCAL, needs=("bash",))
async def bare_shell(world: World) -> None:
    async with world.shell() as box:
        same(parsed((await box.bash(_STATUS)).text.rstrip("\n")), _BARE)


@promises.add(
    "PRIV-004", "A program's set-user-id bit gives nothing.", exempt=NOT_LOCAL, needs=("chmod", "cat")
)
async def set_user_id(world: World) -> None:
    async with world.fresh() as box:
        script = (
            'cp=$(command -v cat); cat "$cp" > own; chmod 6755 own; '
            "./own /proc/self/status > status; for f in /usr/bin/su /usr/bin/mount /bin/su /bin/mount; do "
            "[ -u $f ] && $f --version >/dev/null; done; "
            "while read -r name value; do "
            "case $name in CapEff:|NoNewPrivs:) echo $value;; esac; done < status"
        )
        same((await box.sh(script)).split()[-2:], [_NONE, "1"])


probe(
    "PRIV-005",
    "No process can become another user.",
    """
for name in ("setuid", "setgid", "seteuid", "setegid"):
    refused(name, 12345)
refused("setresuid", 12345, 12345, 12345)
refused("setgroups", 1, (ctypes.c_uint * 1)(12345))
""",
)

probe(
    "PRIV-006",
    "Nothing can be mounted.",
    """
os.chdir(os.environ["HOME"])
os.makedirs("point", exist_ok=True)
for kind in "tmpfs proc sysfs devpts mqueue overlay cgroup2 fuse bpf debugfs".split():
    refused("mount", b"none", b"point", kind.encode(), 0, None)
refused("mount", b"/", b"point", None, 4096 | 16384, None)
for name, arguments in (("fsopen", (430, b"tmpfs", 0)), ("open_tree", (428, -100, b"/", 1))):
    if attempt(c.syscall, *arguments)[0] >= 0:
        print(name)
""",
    harmful=True,
)

probe(
    "PRIV-007",
    "No namespace can be made, by none of the three calls.",
    f"""
flags = {{"user": 0x10000000, "mnt": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000,
         "uts": 0x4000000, "cgroup": 0x2000000, "time": 0x80}}
for name, flag in flags.items():
    refused("unshare", flag)
    refused("unshare", flag | flags["user"])
clone = {_CLONE.get(os.uname().machine)!r}
del flags["time"]  # for `clone`, these bits name a signal
for name, flag in flags.items():
    for more in (0, flags["user"]):
        result, error = attempt(c.syscall, ctypes.c_long(clone), ctypes.c_long(flag | more | 17), 0, 0, 0, 0)
        if result == 0:
            os._exit(0)
        if result > 0:
            os.waitpid(result, 0)
            print("clone", name)
arguments = (ctypes.c_uint64 * 11)(flags["user"], 0, 0, 0, 17)
result, error = attempt(c.syscall, 435, ctypes.byref(arguments), 88)
if result == 0:
    os._exit(0)
if result > 0:
    os.waitpid(result, 0)
    print("clone3")
""",
)

probe(
    "PRIV-008",
    "No other namespace can be joined.",
    """
for process in ("1", "self"):
    for name in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
        try:
            fd = os.open("/proc/%s/ns/%s" % (process, name), os.O_RDONLY)
        except OSError:
            continue
        refused("setns", fd, 0)
""",
)

probe(
    "PRIV-009",
    "The root directory cannot be changed.",
    """
refused("chroot", b"/tmp")
refused("pivot_root", b"/tmp", b"/tmp")
""",
    harmful=True,
)

probe(
    "PRIV-010",
    "No device can be made.",
    """
os.chdir(os.environ["HOME"])
for mode, number in ((0o20666, 0x101), (0o20666, 0x10b), (0o60666, 0x800), (0o60666, 0xfe00)):
    refused("mknod", b"device", mode, ctypes.c_ulong(number))
""",
    harmful=True,
)

probe("PRIV-011", "The kernel's keyrings are closed.", calls(("add_key", "request_key", "keyctl")))
probe(
    "PRIV-012", "io_uring does not exist.", calls(("io_uring_setup", "io_uring_enter", "io_uring_register"))
)
probe(
    "PRIV-013",
    "Kernel modules can be neither loaded nor removed.",
    calls(("init_module", "finit_module", "delete_module")),
)
probe("PRIV-014", "Another kernel cannot be started.", calls(("kexec_load", "kexec_file_load")))
probe("PRIV-015", "bpf, perf and userfaultfd are closed.", calls(("bpf", "perf_event_open", "userfaultfd")))
probe(
    "PRIV-016",
    "The kernel's log cannot be read.",
    calls(("syslog",))
    + """
if attempt(c.klogctl, 10, None, 0)[0] >= 0:
    print("its size is known")
""",
)
probe(
    "PRIV-017", "Files cannot be opened by their handle, past their folders.", calls(("open_by_handle_at",))
)

_INT_80 = """
import mmap
child = os.fork()
if child == 0:
    area = mmap.mmap(-1, 4096, prot=7)
    area.write(b"\\x53\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\x5b\\xc3")  # getpid, by int 0x80
    run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))
    os._exit(0 if run() == -errno.ENOSYS else 1)
status = os.waitpid(child, 0)[1]
if status and not os.WIFSIGNALED(status):
    print("getpid answered")
"""
probe(
    "PRIV-018",
    "System calls by the 32-bit entry do not exist.",
    _INT_80 if os.uname().machine == "x86_64" else "",
)


@promises.add(
    "PRIV-019",
    "Nothing can be typed into a terminal, one's own included.",
    needs=(PYTHON, "bash"),
    exempt=NOT_LOCAL,
)
async def typing(world: World) -> None:
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


@promises.add(
    "PRIV-020", "The kernel's settings in /proc/sys cannot be written.", exempt=NOT_LOCAL, harmful=True
)
async def sysctl(world: World) -> None:
    async with world.fresh(uid=0) as root:
        for box in (world.box, root):
            await box.nothing(
                f"{WRITE}\ncd /proc/sys && for p in */* */*/* net/ipv4/conf/all/*; do [ -f $p ] && w $p; done"
            )


@promises.add("PRIV-021", "/sys is not there, or cannot be written.", exempt=NOT_LOCAL, harmful=True)
async def sysfs(world: World) -> None:
    await world.box.nothing(
        f"{WRITE}\nw /sys/fs/cgroup/x\n"
        "for p in /sys/*/* /sys/*/*/* /sys/fs/cgroup/*/*; do [ -f $p ] && w $p; done"
    )


@promises.add(
    "PRIV-022",
    "What /proc tells of the whole kernel cannot be read or written.",
    exempt=NOT_LOCAL,
    harmful=True,
)
async def kernel_files(world: World) -> None:
    await world.box.nothing(f"""
{WRITE}
for name in kcore kmsg keys key-users timer_list timer_stats sched_debug latency_stats vmallocinfo \
    slabinfo pagetypeinfo kpagecount kpageflags kpagecgroup sysrq-trigger; do
    ( read -r line < /proc/$name && [ "$line" ] ) && echo "$name can be read"
    w /proc/$name
done
read -r address rest < /proc/kallsyms; case $address in *[1-9a-f]*) echo "addresses show: $address";; esac
for p in /proc/irq/*/* /proc/bus/*/* /proc/mtrr /proc/fs/*/*; do [ -f $p ] && w $p; done
""")


@promises.add("PRIV-023", "No process can be kept from being killed when memory ends.", exempt=NOT_LOCAL)
async def out_of_memory(world: World) -> None:
    await world.box.nothing("( echo -1000 > /proc/self/oom_score_adj ) && echo lowered")


@promises.add("PRIV-024", "Limits cannot be raised, and no core file is written.")
async def limits(world: World) -> None:
    script = (
        "ulimit -c; hard=$(ulimit -H -n); ulimit -H -n $((hard + 1)) 2>/dev/null && echo raised; echo end"
    )
    same((await world.box.sh(script)).splitlines()[0], "0")
    if world.walls:
        same((await world.box.sh(script)).splitlines()[1:], ["end"])


probe(
    "PRIV-025",
    "No process can run ahead of all others.",
    """
refused("nice", -5)
refused("setpriority", 0, 0, -10)
refused("sched_setscheduler", 0, 1, ctypes.byref(ctypes.c_int(1)))
""",
)

probe(
    "PRIV-026",
    "The machine cannot be halted, renamed or given swap space.",
    """
refused("reboot", 0)
refused("sethostname", b"x", ctypes.c_size_t(-1))
refused("setdomainname", b"x", ctypes.c_size_t(-1))
refused("swapon", None, 0)
refused("swapoff", None)
refused("quotactl", 0x800002 << 8, None, 0, None)
""",
    harmful=True,
)


@promises.add(
    "PRIV-027",
    "The host's shared memory and queues can be neither seen nor attached.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
)
async def ipc(world: World) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    key = secrets.randbelow(2**30) + 1
    segment = libc.shmget(key, 4096, 0o1666)
    expect(segment >= 0, "the host could not make a segment")
    try:
        await world.python_box.nothing_in_python(
            f"refused('shmget', {key}, 0, 0); refused('shmat', {segment}, None, 0)"
        )
        await world.box.nothing("{ read -r header; while read -r l; do echo $l; done; } < /proc/sysvipc/shm")
    finally:
        libc.shmctl(segment, 0, None)


@promises.add("PRIV-028", "Two sandboxes share no shared memory.", needs=(PYTHON,), exempt=NOT_LOCAL)
async def ipc_between(world: World) -> None:
    key = secrets.randbelow(2**30) + 1
    async with world.fresh(python=True) as box:
        await box.nothing_in_python(
            f"assert c.shmget({key}, 4096, 0o1666) >= 0; assert c.shmget({key}, 0, 0) >= 0"
        )
        try:
            await world.python_box.nothing_in_python(f"refused('shmget', {key}, 0, 0)")
        finally:  # without a namespace of its own it would stay on the host
            await box.nothing_in_python(f"c.shmctl(c.shmget({key}, 0, 0), 0, None)")


@promises.add(
    "PRIV-029",
    "Files of other users cannot be owned, nor given away.",
    harmful=True,
    exempt=NOT_LOCAL,
    needs=(PYTHON,),
)
async def owners(world: World) -> None:
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


@promises.add(
    "PRIV-030",
    "The control groups cannot be changed.",
    exempt=NOT_LOCAL,
)
async def control_groups(world: World) -> None:
    await world.box.nothing(f"""
{WRITE}
cd /sys/fs/cgroup && for p in cgroup.procs */cgroup.procs */release_agent; do w $p; done
""")


@promises.add(
    "PRIV-031",
    "Set-user-id programs of the host do not run as their owner.",
    needs=(NO_IMAGE, "id"),
    exempt=NOT_LOCAL,
    harmful=True,
)
async def set_user_id_host(world: World) -> None:
    await world.box.nothing(
        "for name in su sudo pkexec mount newgrp; do p=/usr/bin/$name; [ -u $p ] && [ -x $p ] && "
        "case $name in su) $p -c 'id -u' ;; sudo) $p -n id -u;; "
        "mount) $p -t tmpfs none /tmp && echo mounted;; esac; done"
    )


@promises.add(
    "PRIV-032",
    "The paths of control groups on the host do not show.",
    exempt={**NOT_LOCAL, "instance": "has no cgroup namespace: Apptainer makes none"},
)
async def control_group_paths(world: World) -> None:
    await world.box.nothing(
        'while IFS= read -r line; do case $line in *:/) ;; *) echo "$line";; esac; done < /proc/self/cgroup'
    )
