"""Promises about file transfers."""

import asyncio
from collections.abc import Awaitable

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import NO_IMAGE, NOT_LOCAL, PromiseBroken, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext

promises = Promises("files")

_ANY_BYTES = bytes(range(256)) * 5 + "☃".encode()


async def fails(call: Awaitable[object]) -> OSError:
    """Return the OSError with which a call fails. Raise PromiseBroken if the call succeeds."""
    try:
        result = await call
    except OSError as error:
        return error
    raise PromiseBroken(f"it gave {result!r}"[:200])


@promises.fresh("FILE-001", "Bytes are read as they were written, even none or very many.")
async def round_trip(box: Probe) -> None:
    path = await box.path("file")
    for data in (_ANY_BYTES, b"", bytes(8_000_000)):
        await box.tools.write(path, data)
        expect(await box.tools.read(path) == data, f"{len(data)} bytes came back changed")


@promises.fresh("FILE-003", "A file has the requested mode.", needs=("ls",))
async def mode(box: Probe) -> None:
    await box.tools.write(await box.path("tool"), b"#!/bin/sh\necho ran\n", mode=0o750)
    expect((await box.sh("ls -l tool")).startswith("-rwxr-x---"), "it has another")
    same(await box.sh("./tool"), "ran")


@promises.add("FILE-004", "A reader sees either the old or the new content, never a part of it.")
async def atomic(world: PromiseContext) -> None:
    async with world.fresh() as box, world.tools(box.sandbox) as reader:
        path = await box.path("file")
        versions = [bytes([65 + number]) * 300_000 for number in range(4)]
        await box.tools.write(path, versions[0])

        async def write() -> None:
            for number in range(24):
                await box.tools.write(path, versions[number % 4])

        writing = asyncio.ensure_future(write())
        while not writing.done():
            expect(await reader.read(path) in versions, "a part was seen")
        await writing


@promises.fresh(
    "FILE-005", "Writing through a link replaces its target, and keeps the link.", needs=("ln", "ls")
)
async def links(box: Probe) -> None:
    await box.sh("echo old > real; ln -s real link")
    await box.tools.write(await box.path("link"), b"new\n")
    same(await box.sh("read -r x < real; echo $x; [ -L link ] && echo link"), "new\nlink")


@promises.fresh(
    "FILE-006", "A write that fails leaves neither a part nor a temporary file.", needs=("mkdir", "ls")
)
async def failed_write(box: Probe) -> None:
    await box.sh("mkdir folder")
    await fails(box.tools.write(await box.path("folder"), b"x"))
    await box.sh(": > plain")
    await fails(box.tools.write(await box.path("plain/x"), b"x"))
    same((await box.sh("ls -A; ls -A folder")).split(), ["folder", "plain"])


@promises.fresh(
    "FILE-007", "Directories, devices and pipes are not read as files, and block no call.", needs=("mkfifo",)
)
async def no_files(box: Probe) -> None:
    await box.sh("mkfifo pipe")
    for path in ("/tmp", "/dev/zero", await box.path("pipe"), "/absent", "relative", "/a\0b"):
        await fails(box.tools.read(path))


@promises.fresh("FILE-008", "At most the requested number of bytes is read, whatever size a file reports.")
async def limit(box: Probe) -> None:
    await box.tools.write(await box.path("file"), b"0123456789")
    same(await box.tools.read(await box.path("file"), limit=4), b"0123")
    expect(b"MemTotal" in await box.tools.read("/proc/meminfo"), "a file of /proc is empty")


@promises.add(
    "FILE-010",
    "The system, and files without write permission, cannot be written.",
    harmful=True,
    needs=(NO_IMAGE,),
    exempt=NOT_LOCAL,
)
async def not_writable(world: PromiseContext) -> None:
    for path in ("/usr/bin/env", "/etc/passwd", "/proc/self/comm-x", "/x"):
        await fails(world.box.tools.write(path, b"x"))
