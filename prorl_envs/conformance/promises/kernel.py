"""Promises about requests to the kernel that every sandbox is refused. Each request is tested."""

import os

from prorl_envs.conformance.promise import NOT_LOCAL, ORDINARY, Promises
from prorl_envs.conformance.promises.filesystems import WRITE
from prorl_envs.conformance.world import PromiseContext

promises = Promises("privileges", exempt=NOT_LOCAL)


#: Number of the system call `clone`, because the C library's wrapper does more than the call.
_CLONE = {"x86_64": 56, "aarch64": 220}


#: System call numbers of the kernel. Repeated here, because the filter's numbers are under test.
_NUMBERS = {
    "x86_64": {
        "add_key": 248, "request_key": 249, "keyctl": 250, "kexec_load": 246, "kexec_file_load": 320,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "perf_event_open": 298, "bpf": 321,
        "userfaultfd": 323, "syslog": 103, "open_by_handle_at": 304, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 206, "fanotify_init": 300,
        "quotactl": 179, "quotactl_fd": 443, "memfd_secret": 447, "vmsplice": 278,
    },
    "aarch64": {
        "add_key": 217, "request_key": 218, "keyctl": 219, "kexec_load": 104, "kexec_file_load": 294,
        "init_module": 105, "finit_module": 273, "delete_module": 106, "perf_event_open": 241, "bpf": 280,
        "userfaultfd": 282, "syslog": 116, "open_by_handle_at": 265, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "io_setup": 0, "fanotify_init": 262,
        "quotactl": 60, "quotactl_fd": 443, "memfd_secret": 447, "vmsplice": 75,
    },
}  # fmt: skip


def calls(names: tuple[str, ...]) -> str:
    """Return Python code that makes system calls with invalid arguments, and prints those not refused.

    An available call fails because of its arguments. A refused call fails before they are checked.
    """
    numbers = _NUMBERS.get(os.uname().machine)
    if numbers is None:
        return ""
    return f"""
for name, number in { ({name: numbers[name] for name in names})!r}.items():
    result, error = attempt(c.syscall, ctypes.c_long(number), ctypes.c_long(-1), ctypes.c_long(-1), 0, 0, 0)
    if error not in (errno.EPERM, errno.ENOSYS):
        print(name, result, errno.errorcode.get(error, error))
"""


promises.probe(
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

promises.probe(
    "PRIV-007",
    "No namespace can be created, by any of the three calls.",
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

promises.probe(
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

promises.probe(
    "PRIV-009",
    "The root directory cannot be changed.",
    """
refused("chroot", b"/tmp")
refused("pivot_root", b"/tmp", b"/tmp")
""",
    harmful=True,
    needs=(ORDINARY,),
)

promises.probe(
    "PRIV-010",
    "No device can be created.",
    """
os.chdir(os.environ["HOME"])
for mode, number in ((0o20666, 0x101), (0o20666, 0x10b), (0o60666, 0x800), (0o60666, 0xfe00)):
    refused("mknod", b"device", mode, ctypes.c_ulong(number))
""",
    harmful=True,
    needs=(ORDINARY,),
)

promises.probe("PRIV-011", "The kernel's keyrings are closed.", calls(("add_key", "request_key", "keyctl")))
promises.probe(
    "PRIV-012", "io_uring does not exist.", calls(("io_uring_setup", "io_uring_enter", "io_uring_register"))
)
promises.probe(
    "PRIV-013",
    "Kernel modules can be neither loaded nor removed.",
    calls(("init_module", "finit_module", "delete_module")),
)
promises.probe("PRIV-014", "Another kernel cannot be started.", calls(("kexec_load", "kexec_file_load")))
promises.probe(
    "PRIV-015", "bpf, perf and userfaultfd are closed.", calls(("bpf", "perf_event_open", "userfaultfd"))
)
promises.probe(
    "PRIV-016",
    "The kernel's log cannot be read.",
    calls(("syslog",))
    + """
if attempt(c.klogctl, 10, None, 0)[0] >= 0:
    print("its size is known")
""",
)
promises.probe(
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
promises.probe(
    "PRIV-018",
    "System calls by the 32-bit entry do not exist.",
    _INT_80,
    machine="x86_64",
)


@promises.add("PRIV-020", "The kernel's settings in /proc/sys cannot be written.", harmful=True)
async def sysctl(world: PromiseContext) -> None:
    async with world.fresh(uid=0) as root:
        for box in (world.box, root):
            await box.nothing(
                f"{WRITE}\ncd /proc/sys && for p in */* */*/* net/ipv4/conf/all/*; do [ -f $p ] && w $p; done"
            )


promises.script(
    "PRIV-021",
    "/sys does not exist, or cannot be written.",
    f"{WRITE}\nw /sys/fs/cgroup/x\n"
    "for p in /sys/*/* /sys/*/*/* /sys/fs/cgroup/*/*; do [ -f $p ] && w $p; done",
    harmful=True,
)


promises.script(
    "PRIV-022",
    "Files in /proc about the whole kernel can be neither read nor written.",
    f"""
{WRITE}
for name in kcore kmsg keys key-users timer_list timer_stats sched_debug latency_stats vmallocinfo \
    slabinfo pagetypeinfo kpagecount kpageflags kpagecgroup sysrq-trigger; do
    ( read -r line < /proc/$name && [ "$line" ] ) && echo "$name can be read"
    w /proc/$name
done
read -r address rest < /proc/kallsyms; case $address in *[1-9a-f]*) echo "addresses show: $address";; esac
for p in /proc/irq/*/* /proc/bus/*/* /proc/mtrr /proc/fs/*/*; do [ -f $p ] && w $p; done
""",
    harmful=True,
)


promises.probe(
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


promises.script(
    "PRIV-032",
    "The paths of control groups on the host do not show.",
    'while IFS= read -r line; do case $line in *:/) ;; *) echo "$line";; esac; done < /proc/self/cgroup',
    exempt={**NOT_LOCAL, "apptainer-instance": "has no cgroup namespace: Apptainer creates none"},
)
