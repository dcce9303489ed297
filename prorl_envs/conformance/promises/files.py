"""Promises about file transfers and the editor."""

import asyncio
from collections.abc import Awaitable

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import NO_IMAGE, NOT_LOCAL, PromiseBroken, Promises, expect, raises, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import InputError
from prorl_envs.tools.protocol.messages import CONTENT_LIMIT
from prorl_envs.tools.types import ToolResult

promises = Promises("files")

_ANY_BYTES = bytes(range(256)) * 5 + "☃".encode()


async def fails(call: Awaitable[object]) -> OSError:
    """Return the OSError with which a call fails. Raise PromiseBroken if the call succeeds."""
    try:
        result = await call
    except OSError as error:
        return error
    raise PromiseBroken(f"it gave {result!r}"[:200])


async def edit(box: Probe, command: str, path: str, **arguments: object) -> ToolResult:
    """Run one command of the editor."""
    return await box.tools.edit({"command": command, "path": path, **arguments})


@promises.fresh("FILE-001", "Bytes are read as they were written, even none or very many.")
async def round_trip(box: Probe) -> None:
    path = await box.path("file")
    for data in (_ANY_BYTES, b"", bytes(8_000_000)):
        await box.tools.write(path, data)
        expect(await box.tools.read(path) == data, f"{len(data)} bytes came back changed")


@promises.fresh("FILE-002", "Missing folders are created.")
async def folders(box: Probe) -> None:
    await box.tools.write(await box.path("a/b/c"), b"x")
    same(await box.sh("read -r x < a/b/c; echo $x"), "x")


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


@promises.add("FILE-009", "Content that is too large for one transfer is refused before it is sent.")
async def too_much(world: PromiseContext) -> None:
    with raises(InputError, "it was taken"):
        await world.box.tools.write("/tmp/much", bytes(CONTENT_LIMIT + 1))


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


@promises.fresh("FILE-011", "The editor creates, shows, replaces, inserts and undoes.")
async def editor(box: Probe) -> None:
    path = await box.path("file.txt")
    expect((await edit(box, "create", path, file_text="one\ntwo\n")).ok, "create failed")
    expect((await edit(box, "str_replace", path, old_str="two", new_str="2")).ok, "str_replace failed")
    expect((await edit(box, "insert", path, insert_line=0, new_str="zero")).ok, "insert failed")
    same(await box.tools.read(path), b"zero\none\n2\n")
    shown = await edit(box, "view", path, view_range=[2, 3])
    expect("one" in shown.text and "zero" not in shown.text, f"it showed {shown.text!r}")
    for left in (b"one\n2\n", b"one\ntwo\n"):
        expect((await edit(box, "undo_edit", path)).ok, "undo failed")
        same(await box.tools.read(path), left)


@promises.fresh("FILE-012", "An edit that does not match exactly one place changes nothing, and reports why.")
async def ambiguous(box: Probe) -> None:
    path = await box.path("file.txt")
    await box.tools.write(path, b"a\nb\na\n")
    for old in ("a", "absent", ""):
        result = await edit(box, "str_replace", path, old_str=old, new_str="x")
        expect(not result.ok and bool(result.text), f"{old!r} gave {result.text!r}")
    expect(not (await edit(box, "create", path, file_text="x")).ok, "create overwrote a file")
    same(await box.tools.read(path), b"a\nb\na\n")


@promises.fresh(
    "FILE-013", "Line ends, odd bytes, a missing last line end and the mode survive an edit.", needs=("ls",)
)
async def kept(box: Probe) -> None:
    path = await box.path("file.txt")
    await box.tools.write(path, b"a1\r\n\xff b\r\nlast", mode=0o755)
    expect((await edit(box, "str_replace", path, old_str="a1", new_str="A")).ok, "the edit failed")
    same(await box.tools.read(path), b"A\r\n\xff b\r\nlast")
    expect((await box.sh("ls -l file.txt")).startswith("-rwxr-xr-x"), "the mode changed")


@promises.fresh("FILE-014", "Binary, huge and special files are refused with a message.", needs=("mkfifo",))
async def no_text(box: Probe) -> None:
    await box.tools.write(await box.path("binary"), bytes(100))
    await box.tools.write(await box.path("huge"), b"x" * 17_000_000)
    await box.sh("mkfifo pipe")
    for name in ("binary", "huge", "pipe", "absent"):
        result = await edit(box, "view", await box.path(name))
        expect(not result.ok and len(result.text) < 1000, f"{name} gave {result.text[:100]!r}")


@promises.fresh("FILE-015", "A directory is listed, and a long answer is bounded.")
async def listing(box: Probe) -> None:
    await box.sh(": > here; i=0; while [ $i -lt 3000 ]; do : > many-$i; i=$((i+1)); done")
    result = await edit(box, "view", await box.path("."))
    expect(result.ok and len(result.text) < 200_000, f"{len(result.text)} characters")
    await box.tools.write(await box.path("long"), b"x" * 1_000_000)
    shown = await edit(box, "view", await box.path("long"))
    expect(len(shown.text) < box.tools.limits.output_bytes + 500 and shown.truncated_bytes > 0, "not bounded")
