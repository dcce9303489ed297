"""Promises about mounts, overlays and masks: changes through them, and hidden paths."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import NO_IMAGE, NOT_LOCAL, PYTHON, Promises, expect, same
from prorl_envs.conformance.promises.filesystems import WRITE, digest
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.base import Mount

promises = Promises("file systems", exempt=NOT_LOCAL)


def tree(world: PromiseContext) -> Path:
    """Create a small tree on the host for the caller alone."""
    source = world.path / secrets.token_hex(4)
    (source / "folder" / "secret").mkdir(parents=True)
    (source / "file").write_text("original\n")
    (source / "folder" / "secret" / "solution").write_text("42\n")
    source.chmod(0o777)  # the mounts must protect it, not the modes
    (source / "file").chmod(0o666)
    return source


@asynccontextmanager
async def mounted(
    world: PromiseContext, *, writable: bool = False, overlay: bool = False, python: bool = False
) -> AsyncIterator[tuple[Probe, Path]]:
    """Start a sandbox with `tree` at /opt/tree."""
    source = tree(world)
    mount = Mount(source=source, target="/opt/tree", writable=writable, overlay=overlay)
    async with world.fresh(mounts=(mount,), python=python) as box:
        yield box, source


@promises.add("FS-010", "A mount can be read and not written.")
async def read_only(world: PromiseContext) -> None:
    async with mounted(world) as (box, source):
        same(await box.sh("read -r x < /opt/tree/file; echo $x"), "original")
        await box.nothing(
            f"{WRITE}\nfor path in /opt/tree/file /opt/tree/new /opt/tree/folder/new; do w $path; done"
        )
        same((source / "file").read_text(), "original\n")


@promises.add("FS-011", "A single file can be mounted, and not written.")
async def one_file(world: PromiseContext) -> None:
    mount = Mount(source=tree(world) / "file", target="/opt/one")
    async with world.fresh(mounts=(mount,)) as box:
        same(await box.sh("read -r x < /opt/one; echo $x"), "original")
        await box.nothing(f"{WRITE}\nw /opt/one")


@promises.add("FS-012", "A writable mount is the host's directory itself.")
async def writable_mount(world: PromiseContext) -> None:
    async with mounted(world, writable=True) as (box, source):
        await box.sh("echo changed > /opt/tree/file")
        same((source / "file").read_text(), "changed\n")


@promises.add(
    "FS-013",
    "An overlay can be changed in every way, and its source never changes.",
    needs=("rm", "mv", "mkdir", "chmod"),
)
async def overlay(world: PromiseContext) -> None:
    async with mounted(world, overlay=True) as (box, source):
        before = digest(source)
        script = (
            "cd /opt/tree && echo changed > file && rm -r folder && mv file moved && mkdir folder "
            "&& chmod 700 moved"
        )
        same(await box.sh(f"{script} && read -r x < moved && echo $x *"), "changed folder moved")
        same(digest(source), before)


@promises.add("FS-014", "Two sandboxes with the same overlay do not see each other's changes.")
async def two_overlays(world: PromiseContext) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree", overlay=True),)
    async with world.fresh(mounts=mounts) as one, world.fresh(mounts=mounts) as two:
        await one.sh("echo one > /opt/tree/file; echo one > /opt/tree/one")
        same(await two.sh("read -r x < /opt/tree/file; cd /opt/tree; echo $x *"), "original file folder")


@promises.add("FS-015", "A descriptor of a read-only file cannot be opened again for writing.")
async def reopen(world: PromiseContext) -> None:
    async with mounted(world) as (box, source):
        await box.nothing(
            f"{WRITE}\nexec 3< /opt/tree/file; w /proc/self/fd/3; w /dev/fd/3; w /proc/thread-self/fd/3"
        )
        same((source / "file").read_text(), "original\n")


@promises.add(
    "FS-016",
    "A read-only mount cannot be changed by hard links, names, modes or times.",
    needs=("ln", "mv", "rm", "chmod", "touch"),
)
async def other_changes(world: PromiseContext) -> None:
    async with mounted(world) as (box, source):
        before = digest(source)
        await box.nothing("""
cd /opt/tree
ln file "$HOME/linked" && echo linked out; ln "$HOME" here && echo linked in; ln -s x here && echo linked
mv file moved && echo moved; rm -f file && echo removed; chmod 0 file && echo mode; touch file && echo touched
""")
        same(digest(source), before)


@promises.add(
    "FS-017",
    "A read-only mount cannot be mounted again writable, or moved, or unmounted.",
    needs=(PYTHON,),
    harmful=True,
)
async def remount(world: PromiseContext) -> None:
    async with mounted(world, python=True) as (box, source):
        await box.nothing_in_python("""
RDONLY, REMOUNT, BIND, MOVE, PRIVATE = 1, 32, 4096, 8192, 1 << 18
for target in (b"/opt/tree", b"/usr", b"/proc", b"/"):
    refused("mount", None, target, None, REMOUNT | BIND, None)
    refused("mount", None, target, None, REMOUNT, None)
    refused("mount", None, target, None, PRIVATE, None)
    refused("mount", target, b"/tmp", None, MOVE, None)
    refused("mount", target, b"/tmp", None, BIND, None)
    refused("umount2", target, 0)
    refused("umount2", target, 2)
""")
        same((source / "file").read_text(), "original\n")


@promises.add("FS-018", "A mask hides the files below it.")
async def mask(world: PromiseContext) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree"),)
    async with world.fresh(mounts=mounts, masks=("/opt/tree/folder/secret",)) as box:
        await box.nothing(
            "for entry in /opt/tree/folder/secret/* /opt/tree/folder/secret/.[a-z]*; do "
            "[ -e $entry ] && echo $entry; done"
        )
        same(await box.sh("[ -d /opt/tree/folder/secret ] && echo there"), "there")


@promises.add(
    "FS-019", "A mask cannot be written, moved or removed.", needs=("mv", "rmdir", "mkdir", "chmod")
)
async def mask_stays(world: PromiseContext) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree", overlay=True),)
    async with world.fresh(mounts=mounts, masks=("/opt/tree/folder/secret",)) as box:
        await box.nothing(f"""
{WRITE}
cd /opt/tree
chmod 777 folder/secret; w folder/secret/x; mkdir folder/secret/y && echo made
rmdir folder/secret && echo removed
mv folder/secret elsewhere && echo moved; mv folder other && echo moved above
for p in folder/secret/solution other/secret/solution elsewhere/solution; do [ -e $p ] && echo $p; done
""")


@promises.add(
    "FS-047",
    "A mount, a mask and the working directory can be below a link of the system's, as /var/tmp is.",
    needs=(NO_IMAGE,),
)
async def below_link(world: PromiseContext) -> None:
    mounts = (Mount(source=tree(world), target="/var/tmp/deep/tree"),)
    masks = ("/var/tmp/deep/tree/folder/secret",)
    async with world.fresh(mounts=mounts, masks=masks, workdir="/var/tmp/work") as box:
        script = (
            "cd /var/tmp/deep/tree && for entry in * folder/*; do echo $entry; done; echo folder/secret/*"
        )
        entries = (
            await box.sh(f"echo x > written; cd /var/tmp/work && read x < written && echo $x\n{script}")
        ).split()
        expect(entries[0] == "x" and "folder/secret" in entries, f"it has {entries}")
        same(entries[-1], "folder/secret/*")
