"""Promises about processes: visibility of, and access to, other processes from inside a sandbox."""

import contextlib
import os
import secrets

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import bystander, eventually, first_process, marked, shared_namespaces
from prorl_envs.conformance.promise import NOT_LOCAL, PYTHON, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import ToolError

promises = Promises("processes", exempt=NOT_LOCAL)

#: Prints the processes whose /proc file $1 contains the text $2$3.
SEARCH = """
search() {
    for file in /proc/[0-9]*/$1; do
        IFS= read -r line < "$file" || :
        case $line in *"$2$3"*) echo "found in $file";; esac
        line=
    done
}
"""


def halves(text: str) -> str:
    """Split a text into two words of a shell, so that a search for the text does not find itself."""
    return f"{text[: len(text) // 2]} {text[len(text) // 2 :]}"


@promises.add("PROC-001", "No process of the host is visible.")
async def invisible(world: PromiseContext) -> None:
    token = secrets.token_hex(16)
    with bystander(token):
        await world.box.nothing(f"{SEARCH}\nsearch cmdline {halves(token)}")


@promises.add("PROC-003", "No process of another sandbox is visible.", needs=("sleep",))
async def other_sandbox(world: PromiseContext) -> None:
    token = secrets.token_hex(16)
    async with world.fresh() as box, world.lingering(box, f": {token}; sleep 600; :"):
        await world.box.nothing(f"{SEARCH}\nsearch cmdline {halves(token)}")


@promises.add("PROC-004", "A process of the host cannot be signalled by its number.", harmful=True)
async def signal_host(world: PromiseContext) -> None:
    with bystander() as target:
        async with world.fresh() as box:
            await box.sh(f"kill -9 {target.pid}; kill -9 -{target.pid}")
        same(target.poll(), None)


@promises.add(
    "PROC-005",
    "`kill -9 -1` reaches no process of the host, and sandbox and tools keep working.",
    harmful=True,
    needs=("sleep",),
)
async def kill_all(world: PromiseContext) -> None:
    with bystander() as target:
        async with world.fresh() as box, world.lingering(box, "sleep 600; :") as mark:
            with contextlib.suppress(ToolError):  # the kill may reach the tool server, which is then replaced
                await box.sh("kill -9 -1")
            expect(await eventually(lambda: not marked(mark)), "the sandbox's own processes live on")
            same(target.poll(), None)
            same(await box.sh("echo on"), "on")
            expect(box.sandbox.alive, "the sandbox ended")


@promises.fresh("PROC-006", "The first process can be neither killed nor stopped.", harmful=True)
async def kill_first(box: Probe) -> None:
    await box.sh("n=1; while [ $n -lt 65 ]; do kill -$n 1; n=$((n+1)); done")
    # An exiting first process takes a moment, during which other processes still run.
    same(await box.sh("sleep 1; echo on"), "on")
    await box.nothing("read -r line < /proc/1/stat; case $line in *') T '*|*') t '*) echo stopped;; esac")
    expect(box.sandbox.alive, "the sandbox ended")


promises.script(
    "PROC-007",
    "The first process shows neither environment, memory, descriptors nor directories.",
    """
for file in environ mem maps auxv fd/0 fd/1; do ( : < /proc/1/$file ) && echo $file; done
for file in environ auxv syscall stack io smaps; do ( read -r line < /proc/1/$file ) && echo $file; done
for folder in root cwd fd; do ( cd /proc/1/$folder && for entry in [0-9]* etc; do
    [ -e "$entry" ] && echo "$folder shows $entry"; done ); done
""",
)


_TRACE = """
PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 16, 0x4206, 17
c.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        for request in (PTRACE_SEIZE, PTRACE_ATTACH):
            result, error = attempt(c.ptrace, request, int(name), None, None)
            if result == 0:
                print("traced", name, open("/proc/%s/cmdline" % name).read())
"""


@promises.fresh(
    "PROC-008",
    "Neither the first process nor a tool server can be traced.",
    needs=(PYTHON,),
    harmful=True,
)
async def trace(box: Probe) -> None:
    await box.nothing_in_python(_TRACE)


_STEAL = """
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(64)
local = Vector(ctypes.cast(buffer, ctypes.c_void_p), 64)
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid():
        continue
    remote = Vector(0x400000, 64)
    for call in ("process_vm_readv", "process_vm_writev"):
        result, error = attempt(
            getattr(c, call), int(name), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if error not in (errno.EPERM, errno.ESRCH, errno.ENOSYS):
            print(call, name, result, errno.errorcode.get(error))
    try:
        pidfd = os.pidfd_open(int(name)) if hasattr(os, "pidfd_open") else -1
    except OSError:
        continue
    for number in range(32):
        if pidfd >= 0 and attempt(c.syscall, 438, pidfd, number, 0)[0] >= 0:
            print("took descriptor", number, "of", name)
"""


@promises.fresh(
    "PROC-009",
    "Memory and descriptors of the first process and of tool servers cannot be accessed.",
    needs=(PYTHON,),
    harmful=True,
)
async def steal(box: Probe) -> None:
    await box.nothing_in_python(_STEAL)


@promises.add("PROC-012", "Orphans are reaped, and their exit does not stop the sandbox.")
async def orphans(world: PromiseContext) -> None:
    zombies = """
for round in 1 2 3 4 5 6 7 8 9 10; do (sh -c 'sh -c :' & sh -c : &); done
rounds=0
while [ $rounds -lt 2000 ]; do
    found=
    for file in /proc/[0-9]*/stat; do read -r line < $file; case $line in *') Z '*) found=$line;; esac; done
    [ "$found" ] || break
    rounds=$((rounds+1))
done
[ "$found" ] && echo "$found"
"""
    async with world.fresh() as box:
        await box.nothing(zombies)
        expect(box.sandbox.alive, "the sandbox ended")


@promises.add("PROC-016", "Processes are in mount, pid, network, ipc and uts namespaces of their own.")
async def namespaces(world: PromiseContext) -> None:
    same(set(world.shared) & {"mnt", "pid", "net", "ipc", "uts"}, set())


@promises.add("PROC-017", "Two sandboxes share no namespace.")
async def between(world: PromiseContext) -> None:
    busy = "while :; do :; done"
    async with (
        world.fresh() as box,
        world.lingering(box, busy) as own_mark,
        world.lingering(world.box, busy) as other_mark,
    ):
        first, second = marked(own_mark)[0], marked(other_mark)[0]
        names = [
            name
            for name in ("mnt", "pid", "net", "ipc", "uts")
            if _inode(first, name) == _inode(second, name)
        ]
        same(names, [])
        same(shared_namespaces(first), world.shared)


#: Only CAP_SYS_PACCT, which allows nothing in a user namespace, but which other processes inside lack.
_OF_FIRST = {0, 1 << 20}


@promises.add("PROC-018", "The first process has no capability that allows anything.")
async def first_capabilities(world: PromiseContext) -> None:
    script = "while read -r name value; do case $name in Cap[PE]*:) echo $value;; esac; done < /proc/1/status"
    found = {int(word, 16) for word in (await world.box.sh(script)).split()}
    expect(bool(found) and found <= _OF_FIRST, f"it has {found}")


@promises.add(
    "PROC-019",
    "Seen from the host, the first process has no descriptors but its standard streams.",
    exempt={
        **NOT_LOCAL,
        "apptainer-instance": "has a first process that forks tool servers, and is closed to the host",
    },
)
async def first_descriptors(world: PromiseContext) -> None:
    async with world.lingering(world.box, "while :; do :; done") as mark:
        first = first_process(marked(mark)[0])
    names = sorted(os.listdir(f"/proc/{first}/fd"), key=int)  # noqa: PTH208 - names alone
    same(names, ["0", "1", "2"])


def _inode(pid: int, namespace: str) -> int:
    return os.stat(f"/proc/{pid}/ns/{namespace}").st_ino  # noqa: PTH116 - one call
