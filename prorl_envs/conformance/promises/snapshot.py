"""Promises about snapshots: a sandbox's files at one moment, from which others start."""

import asyncio
import secrets
from dataclasses import replace

from prorl_envs.conformance.promise import IMAGE, NOT_LOCAL, ORDINARY, Promises, expect, raises, same
from prorl_envs.conformance.promises.mounts import tree
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Mount

promises = Promises("snapshots")


@promises.add(
    "SNAP-001",
    "A sandbox started from a snapshot has its files, with their modes and links.",
    needs=("ln", "ls", "chmod", "mkdir"),
)
async def files(world: PromiseContext) -> None:
    script = "mkdir -p a/b; echo deep > a/b/c; echo x > tool; chmod 751 tool; ln -s tool link; ln tool hard"
    async with world.fresh() as box:
        await box.sh(f'{script}; echo home > "$HOME/at-home"')
        snapshot = await box.sandbox.snapshot()
    async with world.started(snapshot.spec, snapshot=snapshot) as fork:
        same(await fork.sh('read -r x < a/b/c; read -r y < "$HOME/at-home"; echo $x $y'), "deep home")
        expect((await fork.sh("ls -l tool")).startswith("-rwxr-x--x"), "the mode is another")
        same(await fork.sh("[ -L link ] && read -r x < link && echo $x"), "x")


@promises.add(
    "SNAP-002",
    "A snapshot contains changes to the image and to overlays.",
    needs=(IMAGE, "rm", "mkdir"),
    exempt={
        **NOT_LOCAL,
        "apptainer-instance": "keeps changes to an image in memory, and warns about that",
    },
)
async def layers(world: PromiseContext) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree", overlay=True),)
    async with world.fresh(mounts=mounts) as box:
        await box.sh(
            "mkdir /made; echo x > /made/file; echo changed > /opt/tree/file; rm -r /opt/tree/folder"
        )
        snapshot = await box.sandbox.snapshot()
    async with world.started(snapshot.spec, snapshot=snapshot) as fork:
        script = "read -r x < /opt/tree/file; cd /opt/tree; echo $x * /made/*"
        same(await fork.sh(script), "changed file /made/file")


@promises.add("SNAP-003", "A snapshot, its sandbox and all that start from it change independently.")
async def apart(world: PromiseContext) -> None:
    read = "read -r x < file; echo $x"
    async with world.fresh() as box:
        await box.sh("echo first > file")
        snapshot = await box.sandbox.snapshot()
        await box.sh("echo later > file")
        async with (
            world.started(snapshot.spec, snapshot=snapshot) as one,
            world.started(snapshot.spec, snapshot=snapshot) as two,
        ):
            await one.sh("echo one > file")
            same([await each.sh(read) for each in (box, one, two)], ["later", "one", "first"])


@promises.add(
    "SNAP-004",
    "A snapshot outlives its sandbox, and a sandbox started from a snapshot outlives the snapshot.",
)
async def lives_on(world: PromiseContext) -> None:
    async with world.fresh() as box:
        await box.sh("echo kept > file")
        snapshot = await box.sandbox.snapshot()
    async with world.started(snapshot.spec, snapshot=snapshot) as fork:
        await snapshot.remove()
        await snapshot.remove()
        same(await fork.sh("read -r x < file; echo $x"), "kept")


@promises.add(
    "SNAP-005", "Links are copied as links, so no file of the host gets into a snapshot.", needs=("ln",)
)
async def links(world: PromiseContext) -> None:
    target = world.path / secrets.token_hex(4)
    target.mkdir()
    (target / "file").write_text("the host's")
    async with world.fresh() as box:
        await box.sh(f"ln -s {target}/file one; ln -s {target} folder; ln -s / root")
        snapshot = await box.sandbox.snapshot()
    expect((snapshot.workspace / "one").is_symlink(), "a link was followed")
    expect((snapshot.workspace / "folder").is_symlink(), "a link to a folder was followed")


@promises.add(
    "SNAP-006", "Pipes, sockets and holes in files neither block nor enlarge a snapshot.", needs=("mkfifo",)
)
async def odd_files(world: PromiseContext) -> None:
    async with world.fresh() as box:
        await box.sh("mkfifo pipe; echo x > plain")
        with (box.sandbox.workspace / "hole").open("wb") as file:
            file.truncate(1 << 36)
        snapshot = await box.sandbox.snapshot()
    blocks = (snapshot.workspace / "hole").stat().st_blocks
    expect(blocks < 1 << 15, f"a hole became {blocks} blocks")


@promises.add(
    "SNAP-007",
    "A spec with another uid, image, directory or mount is refused; another environment is not.",
    needs=(ORDINARY,),
)
async def other_spec(world: PromiseContext) -> None:
    async with world.fresh() as box:
        snapshot = await box.sandbox.snapshot()
    spec = replace(snapshot.spec, env={"A": "b"})
    async with world.started(spec, snapshot=snapshot) as fork:
        same(await fork.sh("echo $A"), "b")
    with raises(SandboxError, "another user's was started"):
        await (await world.driver.start(replace(snapshot.spec, uid=77), snapshot=snapshot)).close()


@promises.add("SNAP-008", "A closed sandbox has no snapshot.")
async def closed(world: PromiseContext) -> None:
    sandbox = await world.driver.start(world.spec())
    await sandbox.close()
    with raises(SandboxError, "it was copied"):
        await sandbox.snapshot()


@promises.add("SNAP-009", "A snapshot cancelled at any moment leaves nothing, and the sandbox keeps running.")
async def cancelled(world: PromiseContext) -> None:
    async with world.own_driver() as (driver, _):
        sandbox = await driver.start(world.spec())
        (sandbox.workspace / "much").write_bytes(bytes(30_000_000))
        for delay_ms in (0, 1, 3, 10):
            copying = asyncio.ensure_future(sandbox.snapshot())
            await asyncio.wait([copying], timeout=delay_ms / 1000)
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        expect(sandbox.alive, "the sandbox ended")
        await sandbox.snapshot()


@promises.add(
    "SNAP-010",
    "Running processes continue, and are not part of the snapshot.",
    needs=("sleep",),
    exempt=NOT_LOCAL,
)
async def processes(world: PromiseContext) -> None:
    async with world.fresh() as box, world.lingering(box, "sleep 600; :"):
        snapshot = await box.sandbox.snapshot()
        async with world.started(snapshot.spec, snapshot=snapshot) as fork:
            count = await fork.sh("set -- /proc/[0-9]*; echo $#")
            expect(int(count) <= 4, f"{count} processes are in the fork")
