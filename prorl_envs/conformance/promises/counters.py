"""Promises about resources held by descriptors: counted by the kernel per user, or hidden."""

from prorl_envs.conformance.attacks import HELD_S, START, attack
from prorl_envs.conformance.host import eventually
from prorl_envs.conformance.promise import NOT_LOCAL, PYTHON, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import SandboxLimit
from prorl_envs.sandbox.base import SandboxLimits

promises = Promises("resources held by descriptors", exempt=NOT_LOCAL)

_SMALL = SandboxLimits(memory_bytes=128 << 20, processes=64, open_files=8192, disk_bytes=64 << 20)
_TIMEOUT_S = 120.0
#: Parts of the reason for a kill if a counter of the user is exceeded.
_TOO_MANY = ("share", "holds the most")


async def _is_killed(world: PromiseContext, code: str, reasons: tuple[str, ...]) -> None:
    """Check that the sandbox is killed, for one of these reasons."""
    async with world.fresh(python=True) as box:
        try:
            done = await box.tools.run([box.python, "-I", "-c", code], timeout_s=_TIMEOUT_S)
        except SandboxLimit as limit:
            expect(any(reason in str(limit) for reason in reasons), f"it ended because {limit}")
            return
        expect(False, f"it was not killed: {done.output[-300:]!r}")


async def _is_stopped(world: PromiseContext, code: str) -> None:
    """Check that a program that exceeds a limit is killed, or its sandbox is."""
    async with world.fresh(python=True, limits=_SMALL) as box:
        try:
            done = await box.tools.run([box.python, "-I", "-c", code], timeout_s=_TIMEOUT_S)
        except SandboxLimit:
            return
        expect(b"held" not in done.output, f"it was not stopped: {done.output[-300:]!r}")
        expect(done.exit_code == -9, f"it ended otherwise: {done.output[-500:]!r}")


def _add(id_: str, text: str, name: str, *reasons: str) -> None:
    """Add a promise about an attack: the sandbox is killed for one of these reasons. Without reasons, killing
    the program is enough.
    """

    async def keep(world: PromiseContext) -> None:
        await (_is_killed(world, attack(name), reasons) if reasons else _is_stopped(world, attack(name)))

    promises.add(id_, text, needs=(PYTHON,), harmful=True)(keep)


_add(
    "HOLD-001",
    "A sandbox that takes more than its share of the user's epoll watches is killed.",
    "epoll watches",
    *_TOO_MANY,
)
_add(
    "HOLD-002",
    "A sandbox that keeps more than its share of descriptors in flight is killed.",
    "descriptors in flight",
    *_TOO_MANY,
)
_add("HOLD-003", "Memory files whose descriptors are in flight count as memory.", "memory files in flight")
_add(
    "HOLD-004",
    "Memory files count as memory whatever the numbers of their descriptors.",
    "memory files at high descriptors",
)
_add(
    "HOLD-005",
    "Unlinked files count towards the disk limit while their descriptors are in flight.",
    "unlinked files in flight",
)
_add(
    "HOLD-006", "Unlinked files count towards the disk limit while they are mapped.", "unlinked files mapped"
)
_add("HOLD-007", "A process's memory still counts after its first thread has exited.", "first thread ended")


@promises.add(
    "HOLD-008",
    "Tools of a sandbox work while another has the most descriptors in flight; further sandboxes start.",
    needs=(PYTHON,),
    harmful=True,
)
async def neighbours(world: PromiseContext) -> None:
    filling = f"""
{START}
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
null, sockets = os.open("/dev/null", os.O_RDONLY), []
while not os.path.exists("go"):
    time.sleep(0.01)
try:
    for _ in range(hard // 200 - 1):
        sockets.append(fly(*[null] * 253))
except OSError:
    pass
open("full", "w").close()
time.sleep({HELD_S})
"""
    async with world.fresh(python=True) as other, world.fresh(python=True) as box:
        await other.bash("kept=8")
        async with world.lingering(box, f"exec {box.python} -I -c '{filling}'"):
            full = box.sandbox.workspace / "full"
            # From inside: a file from outside does not show in an overlay.
            await box.tools.write(await box.path("go"), b"")
            # Soon after, it is killed.
            expect(await eventually(lambda: full.exists() or not box.sandbox.alive), "it took none")
            same((await other.bash("sleep 0.3; echo $kept")).text, "8\n")
            same((await other.bash("echo $kept")).text, "8\n")
            async with world.fresh() as third:
                same((await third.bash("echo on")).text, "on\n")


_add(
    "HOLD-009",
    "A sandbox that hides descriptors in flight is killed.",
    "descriptors that cannot be seen",
    "hidden descriptors in flight",
)
_add(
    "HOLD-010",
    "Memory of a process that the host may not read counts, or it is killed.",
    "unreadable program",
)
_add("HOLD-011", "Page tables count as memory.", "page tables")
_add("HOLD-012", "Buffers of sockets count as memory.", "buffers of sockets")
_add("HOLD-013", "The kernel's memory for mappings counts.", "mappings")
_add(
    "HOLD-014",
    "A sandbox that takes most of the user's pipes of full size is killed.",
    "pipes",
    *_TOO_MANY,
)
