"""Promises about limits: resources that a sandbox cannot exhaust."""

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import NOT_LOCAL, ORDINARY, Promises, expect, same
from prorl_envs.sandbox.base import SandboxLimits

promises = Promises("limits")

_NOT_LOCAL = {"local": "has no pid namespace, and enforces only limits per process"}
_SMALL = SandboxLimits(memory_bytes=96 << 20, processes=40, disk_bytes=20 << 20)


@promises.fresh(
    "LIM-001",
    "/run has a size limit, and reaching it harms nothing else.",
    needs=(ORDINARY, "head", "rm"),
    exempt={
        **NOT_LOCAL,
        "apptainer-instance": "counts /run as memory, with the sandbox's memory limit only",
    },
    harmful=True,
)
async def run_directory(box: Probe) -> None:
    await box.nothing("head -c 400000000 /dev/zero > /run/much && echo 'no end at 400 MB'")
    same(await box.sh("rm /run/much; echo x > file && echo on"), "on")


@promises.fresh(
    "LIM-002",
    "Open files are limited, and reaching the limit harms neither tools nor sandbox.",
    needs=("bash",),
)
async def open_files(box: Probe) -> None:
    script = "i=0; while [ $i -lt 5000 ]; do exec {f}< /dev/null || break; i=$((i+1)); done; echo $i"
    count = (await box.sh(f"bash -c '{script}' 2>/dev/null")).split()
    expect(bool(count) and int(count[-1]) < 5000, f"{count} files could be opened")
    same(await box.sh("echo on"), "on")


def _add(id_: str, text: str, command: str, notice: str, needs: tuple[str, ...]) -> None:
    """Add a promise that a shell command that exceeds a limit causes a notice and spares the shell."""

    @promises.fresh(
        id_, text, fields={"limits": _SMALL}, needs=("bash", *needs), exempt=_NOT_LOCAL, harmful=True
    )
    async def _(box: Probe) -> None:
        await box.bash("kept=8")
        notices = " ".join((await box.bash(command)).data.get("limits", ()))
        if not notices:  # the notice arrived after the command had finished
            notices = " ".join((await box.bash("sleep 3")).data.get("limits", ()))
        expect(notice in notices, f"the notices are {notices!r}")
        same((await box.bash("echo $kept")).text, "8\n")


_add(
    "LIM-004",
    "A command that exceeds the memory limit is killed and the model notified; the shell is kept.",
    # `tail` keeps the requested number of bytes in memory.
    "head -c 3000000000 /dev/zero | tail -c 3000000000 > /dev/null",
    "memory limit of 96 MB was reached",
    ("head", "tail", "sleep"),
)
_add(
    "LIM-005",
    "Processes beyond the limit are killed and the model notified; the shell is kept.",
    "(for i in {1..60}; do (trap '' TERM; sleep 20) & done) > /dev/null 2>&1; sleep 5",
    "limit of 40 processes was reached",
    ("sleep",),
)
_add(
    "LIM-006",
    "A command that fills the disk is killed and the model notified; the shell is kept.",
    # A separate bash runs the loop: a shell that continues to write is killed too.
    "bash -c 'for i in {1..30}; do head -c 1000000 /dev/zero > file$i; sleep 0.1; done; sleep 5'",
    "disk limit of 20 MB was reached",
    ("head", "sleep"),
)
