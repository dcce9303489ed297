"""Promises about starting sandboxes, and about refused specs."""

import asyncio
import os
from dataclasses import replace

from prorl_envs.conformance import host
from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import marked
from prorl_envs.conformance.promise import NOT_LOCAL, PromiseBroken, Promises, expect, raises, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Driver, Mount, Sandbox, SandboxSpec
from prorl_envs.tools.client.connection import ENTRY

promises = Promises("start")


async def refused(world: PromiseContext, spec: SandboxSpec) -> SandboxError:
    """Return the error with which `spec` is refused.

    Raises:
        PromiseBroken: the spec is not refused.
    """
    try:
        sandbox = await world.driver.start(spec)
    except SandboxError as error:
        return error
    await sandbox.close()
    raise PromiseBroken(f"a sandbox started with {spec}")


@promises.add("START-001", "The driver and its sandboxes have every part of the contract.")
async def contract(world: PromiseContext) -> None:
    expect(isinstance(world.driver, Driver), "the driver lacks a part of `Driver`")
    expect(isinstance(world.box.sandbox, Sandbox), "the sandbox lacks a part of `Sandbox`")


@promises.add("START-002", "A started sandbox is alive, keeps its spec, and has a unique id.")
async def identity(world: PromiseContext) -> None:
    spec = world.spec(env={"A": "b"})
    first, second = await asyncio.gather(world.driver.start(spec), world.driver.start(spec))
    try:
        expect(first.alive and second.alive, "not alive")
        same(replace(first.spec, limits=None), spec)
        expect(first.spec.limits is not None, "it has no limits")
        expect(first.id != second.id, f"both are {first.id}")
    finally:
        await asyncio.gather(first.close(), second.close())


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


@promises.add("START-007", "A start that cannot succeed raises SandboxError, and the next start works.")
async def failed_start(world: PromiseContext) -> None:
    absent = Mount(source=world.path / "absent", target="/opt/absent")
    error = await refused(world, world.spec(mounts=(absent,)))
    expect(bool(error.message), "the error says nothing")
    async with world.fresh() as box:
        same(await box.sh("echo works"), "works")


@promises.add("START-008", "A missing image is refused with its name.")
async def absent_image(world: PromiseContext) -> None:
    error = await refused(world, SandboxSpec(image=world.path / "absent.sif"))
    expect("absent.sif" in str(error), f"it says {error}")


@promises.add("START-009", "A file that is not an image is refused.", exempt={"local": "refuses every image"})
async def no_image(world: PromiseContext) -> None:
    path = world.path / "no-image"
    path.write_text("this is no image")
    await refused(world, SandboxSpec(image=path))


@promises.add(
    "START-010",
    "Paths inside that are relative, have `..` or are the root are refused; an emulated root may work in /.",
)
async def bad_paths(world: PromiseContext) -> None:
    for path in ("work", "/work/../etc", "/", "/a\0b"):
        if path != "/" or not world.subject.emulate_root:
            await refused(world, world.spec(workdir=path))
        await refused(world, world.spec(masks=(path,)))
        await refused(world, world.spec(mounts=(Mount(source=world.path, target=path),)))


@promises.add("START-011", "Invalid host names are refused.")
async def bad_hostnames(world: PromiseContext) -> None:
    for name in ("", "-a", "a b", "a\nb", "x" * 200, "--bind"):
        await refused(world, world.spec(hostname=name))


@promises.add("START-012", "A mount cannot be both writable and an overlay.")
async def contradiction(world: PromiseContext) -> None:
    await refused(
        world, world.spec(mounts=(Mount(source=world.path, target="/opt/x", writable=True, overlay=True),))
    )


@promises.add("START-013", "Only entries that a template lists can be spawned.")
async def unlisted(world: PromiseContext) -> None:
    for entry, template in (("os:abort", "base"), (ENTRY, "absent")):
        with raises(SandboxError, f"{entry} of template {template} was spawned"):
            (await world.box.sandbox.spawn(entry, template=template)).close()


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


@promises.add("START-015", "A closed driver starts nothing.")
async def closed_driver(world: PromiseContext) -> None:
    async with world.own_driver() as (driver, _):
        await driver.aclose()
        await driver.aclose()
        with raises(SandboxError, "a sandbox started"):
            await driver.start(world.spec())


@promises.add("START-016", "Closing the driver closes all its sandboxes.")
async def driver_close(world: PromiseContext) -> None:
    async with world.own_driver() as (driver, _):
        sandboxes = [await driver.start(world.spec()) for _ in range(3)]
        await driver.aclose()
        expect(not any(sandbox.alive for sandbox in sandboxes), "one is alive")


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
