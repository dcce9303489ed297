"""Promises about fresh processes: one command, its output and its exit."""

import asyncio

from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.host import MARK, eventually, marked
from prorl_envs.conformance.promise import Promises, expect, raises, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("fresh processes")


@promises.add("RUN-001", "The exit status of a process is returned; a signal is a negative number.")
async def status(world: PromiseContext) -> None:
    same((await world.box.run("exit 7")).exit_code, 7)
    same((await world.box.run("kill -15 $$")).exit_code, -15)


@promises.add("RUN-002", "The output is returned as bytes, both streams in one.")
async def output(world: PromiseContext) -> None:
    same((await world.box.run(r"printf 'a\000\377'; printf b >&2")).output, b"a\x00\xffb")


@promises.add("RUN-003", "The process can read its input, of any size, or none.", needs=("wc", "cat"))
async def stdin(world: PromiseContext) -> None:
    same((await world.box.run("cat", stdin=b"a\0b")).output, b"a\0b")
    same((await world.box.run("wc -c", stdin=bytes(5_000_000))).output.split(), [b"5000000"])
    same((await world.box.run("cat")).output, b"")


@promises.add("RUN-004", "A process that does not read its input causes no error.")
async def unread(world: PromiseContext) -> None:
    same((await world.box.run("exit 3", stdin=bytes(5_000_000))).exit_code, 3)


@promises.add("RUN-005", "A process starts in the requested directory, or in the working directory.")
async def directory(world: PromiseContext) -> None:
    done = await world.box.tools.run(["/bin/sh", "-c", "pwd"], cwd="/tmp", timeout_s=TIMEOUT_S)
    same(done.output, b"/tmp\n")


@promises.add("RUN-006", "A missing program or directory raises OSError, as it would locally.")
async def absent(world: PromiseContext) -> None:
    for argv, cwd in (
        (["no-such-program"], ""),
        (["/bin/sh"], "/absent"),
        ([], ""),
        (["a\0b"], ""),
        (["/tmp"], ""),
    ):
        with raises(OSError, f"{argv} ran in {cwd or 'the working directory'}"):
            await world.box.tools.run(argv, cwd=cwd, timeout_s=TIMEOUT_S)


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


@promises.add("RUN-011", "Thirty-two processes at once each get their own output.")
async def many(world: PromiseContext) -> None:
    done = await asyncio.gather(*(world.box.run(f"echo {number}; exit {number}") for number in range(32)))
    same([(d.output, d.exit_code) for d in done], [(f"{n}\n".encode(), n) for n in range(32)])


@promises.fresh("RUN-012", "Calls cancelled at any moment leave the tools usable.", needs=("sleep",))
async def cancel_storm(box: Probe) -> None:
    calls = [asyncio.ensure_future(box.run(f"sleep 0.0{number % 10}; echo {number}")) for number in range(40)]
    await asyncio.wait(calls, timeout=0.03, return_when=asyncio.FIRST_COMPLETED)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    same(await box.sh("echo on"), "on")


@promises.add(
    "RUN-013", "A process that closes its output and keeps running is waited for.", needs=("sleep",)
)
async def closed_output(world: PromiseContext) -> None:
    same((await world.box.run("exec >&- 2>&-; sleep 0.2; exit 5")).exit_code, 5)
