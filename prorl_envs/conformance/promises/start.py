"""Promises about starting sandboxes."""

import asyncio
import os

from prorl_envs.conformance import host
from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import marked
from prorl_envs.conformance.promise import NOT_LOCAL, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("start")


@promises.fresh(
    "START-003",
    "Processes start in the spec's working directory.",
    exempt={"local": "has no directory of that name; processes start in the workspace"},
    fields={"workdir": "/srv/work/deep"},
)
async def workdir(box: Probe) -> None:
    same(await box.sh("pwd"), "/srv/work/deep")


@promises.fresh("START-004", "Files written in the working directory inside are in `workspace` on the host.")
async def workspace_out(box: Probe) -> None:
    await box.sh("echo inside > made")
    same((box.sandbox.workspace / "made").read_text(), "inside\n")


@promises.fresh("START-005", "Files that the host puts into `workspace` are visible inside.")
async def workspace_in(box: Probe) -> None:
    (box.sandbox.workspace / "given").write_text("from the host\n")
    same(await box.sh("read line < given; echo $line"), "from the host")


@promises.add("START-006", "On the host, only its user can read a workspace.")
async def workspace_private(world: PromiseContext) -> None:
    path = world.box.sandbox.workspace
    modes = [parent.stat().st_mode & 0o077 for parent in (path, *path.parents)]
    expect(0 in modes, f"{path} is open to others, all the way up")


@promises.add("START-014", "A start cancelled at any moment leaves neither processes nor files.")
async def cancelled_start(world: PromiseContext) -> None:
    async with world.own_driver() as (driver, _):
        for delay_ms in (0, 1, 3, 6, 10, 20):
            start = asyncio.ensure_future(driver.start(world.spec()))
            await asyncio.wait([start], timeout=delay_ms / 1000)
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
        sandbox = await driver.start(world.spec())
        expect(sandbox.alive, "no start works after cancelled ones")


@promises.add(
    "START-017", "Seen from the host, the processes of a sandbox belong to the host's user.", needs=("sleep",)
)
async def owner(world: PromiseContext) -> None:
    async with world.lingering(world.box, "sleep 600; :") as mark:
        same({host.owner(pid) for pid in marked(mark)}, {os.geteuid()})


@promises.add(
    "START-018", "Twelve sandboxes that are started at once are separate.", harmful=True, exempt=NOT_LOCAL
)
async def many(world: PromiseContext) -> None:
    async def read_back(number: int) -> str:
        async with world.fresh(env={"NUMBER": str(number)}) as box:
            return await box.sh("echo $NUMBER > /tmp/number; read n < /tmp/number; echo $n")

    same(await asyncio.gather(*map(read_back, range(12))), [str(number) for number in range(12)])
