"""Promises about fresh processes: one command, its output and its exit."""

from prorl_envs.conformance.box import TIMEOUT_S
from prorl_envs.conformance.host import MARK, eventually, marked
from prorl_envs.conformance.promise import Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("fresh processes")


@promises.add("RUN-001", "The exit status of a process is returned; a signal is a negative number.")
async def status(world: PromiseContext) -> None:
    same((await world.box.run("exit 7")).exit_code, 7)
    same((await world.box.run("kill -15 $$")).exit_code, -15)


@promises.add("RUN-003", "The process can read its input, of any size, or none.", needs=("wc", "cat"))
async def stdin(world: PromiseContext) -> None:
    same((await world.box.run("cat", stdin=b"a\0b")).output, b"a\0b")
    same((await world.box.run("wc -c", stdin=bytes(5_000_000))).output.split(), [b"5000000"])
    same((await world.box.run("cat")).output, b"")


@promises.add(
    "RUN-007", "At its deadline the process is killed with its group; its output is kept.", needs=("sleep",)
)
async def deadline(world: PromiseContext) -> None:
    done = await world.box.tools.run(["/bin/sh", "-c", "echo before; sleep 600; :"], timeout_s=1.0)
    same((done.output, done.timed_out, done.exit_code), (b"before\n", True, None))


@promises.add(
    "RUN-008", "Processes that a process leaves in its group are killed when it exits.", needs=("sleep",)
)
async def leftovers(world: PromiseContext) -> None:
    mark = f"left-{id(world)}"
    done = await world.box.run("sleep 600 & echo started", env={MARK: mark})
    same(done.output, b"started\n")
    expect(await eventually(lambda: not marked(mark)), "it lives on")


@promises.add(
    "RUN-009",
    "The output of a process is bounded; both ends are kept and the rest is counted.",
    needs=("head", "tr"),
)
async def bounded(world: PromiseContext) -> None:
    script = "echo first; head -c 50000000 /dev/zero | tr '\\0' x; echo; echo last"
    done = await world.box.tools.run(["/bin/sh", "-c", script], timeout_s=TIMEOUT_S, output_limit=10_000)
    expect(done.output.startswith(b"first\nxx") and done.output.endswith(b"x\nlast\n"), "an end is missing")
    same(done.truncated_bytes, 50_000_012 - 10_000)
    expect(len(done.output) < 10_200, f"{len(done.output)} bytes")


@promises.add("RUN-010", "A cancelled process is killed, and the tools stay usable.", needs=("sleep",))
async def cancelled(world: PromiseContext) -> None:
    async with world.fresh() as box:
        async with world.lingering(box, "sleep 600; :") as mark:
            pass
        expect(await eventually(lambda: not marked(mark)), "it lives on")
        same(await box.sh("echo on"), "on")
