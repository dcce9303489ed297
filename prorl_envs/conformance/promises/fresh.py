"""Promises about fresh processes: one command, its output and its exit."""

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
    "RUN-008", "Processes that a process leaves in its group are killed when it exits.", needs=("sleep",)
)
async def leftovers(world: PromiseContext) -> None:
    mark = f"left-{id(world)}"
    done = await world.box.run("sleep 600 & echo started", env={MARK: mark})
    same(done.output, b"started\n")
    expect(await eventually(lambda: not marked(mark)), "it lives on")
