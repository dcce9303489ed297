"""What files a sandbox sees, which it can change, and who notices."""

import contextlib
import hashlib
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prorl_envs.conformance.box import TIMEOUT_S, Box
from prorl_envs.conformance.promise import IMAGE, NO_IMAGE, NOT_LOCAL, PYTHON, Promises, Untried, expect, same
from prorl_envs.conformance.world import World
from prorl_envs.sandbox.base import Mount, SandboxSpec

promises = Promises("file systems")

#: `w PATH` prints PATH where it can be opened for writing; nothing is written.
WRITE = 'w() { ( : >> "$1" ) 2>/dev/null && echo "$1 can be written"; }'


def tree(world: World) -> Path:
    """A small tree on the host, of the caller's own."""
    source = world.path / secrets.token_hex(4)
    (source / "folder" / "secret").mkdir(parents=True)
    (source / "file").write_text("original\n")
    (source / "folder" / "secret" / "solution").write_text("42\n")
    source.chmod(0o777)  # the walls hold, not the modes
    (source / "file").chmod(0o666)
    return source


@asynccontextmanager
async def mounted(
    world: World, *, writable: bool = False, overlay: bool = False, python: bool = False
) -> AsyncIterator[tuple[Box, Path]]:
    """A sandbox with `tree` at /opt/tree."""
    source = tree(world)
    mount = Mount(source=source, target="/opt/tree", writable=writable, overlay=overlay)
    async with world.fresh(mounts=(mount,), python=python) as box:
        yield box, source


def digest(path: Path) -> str:
    """Of a file, or of all names, sizes and times in a directory."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    found = sorted(
        (str(p.relative_to(path)), s.st_size, s.st_mtime_ns, s.st_mode)
        for p in path.rglob("*")
        for s in [p.lstat()]
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


@promises.add("FS-001", "Working directory, home, /tmp and /dev/shm can be written.", needs=("rm",))
async def writable(world: World) -> None:
    name = secrets.token_hex(8)
    script = (
        f'for d in . "$HOME" /tmp /dev/shm; do echo x > "$d/{name}" && read -r x < "$d/{name}" && echo $x; '
        f'rm "$d/{name}"; done'
    )
    same(await world.box.sh(script), "x\nx\nx\nx")


@promises.add(
    "FS-002", "Without an image, the system is read-only.", needs=(NO_IMAGE,), exempt=NOT_LOCAL, harmful=True
)
async def system(world: World) -> None:
    await world.box.nothing(
        f"{WRITE}\n"
        "for p in /x /usr/x /usr/bin/x /etc/x /etc/passwd /usr/bin/env /var/x /home/x; do w $p; done"
    )


@promises.add(
    "FS-003",
    "With an image, its system can be changed, and the change is one's own.",
    needs=(IMAGE, "mkdir"),
    exempt=NOT_LOCAL,
)
async def image_changes(world: World) -> None:
    async with world.fresh() as box, world.fresh() as other:
        same(await box.sh("mkdir /made && echo own > /made/file && read -r x < /made/file && echo $x"), "own")
        same(await other.sh("[ -e /made ] || echo absent"), "absent")
    async with world.fresh() as box:
        same(await box.sh("[ -e /made ] || echo absent"), "absent")


@promises.add(
    "FS-004", "The image on the host never changes.", needs=(IMAGE, "rm"), exempt=NOT_LOCAL, harmful=True
)
async def image_same(world: World) -> None:
    assert world.subject.image is not None
    before = digest(world.subject.image)
    async with world.fresh() as box:
        await box.sh(
            "for p in /made /etc/passwd /bin/sh; do echo x > $p; done; "
            "rm -rf /etc /opt /bin /usr; echo x > /bin"
        )
    same(digest(world.subject.image), before)


@promises.add("FS-005", "With an image, the system is the image's.", needs=(IMAGE,), exempt=NOT_LOCAL)
async def image_seen(world: World) -> None:
    image = world.subject.image
    assert image is not None
    inside = await world.box.sh("for entry in /*; do echo ${entry#/}; done")
    if image.is_dir():
        missing = {p.name for p in image.iterdir() if not p.name.startswith(".")} - set(inside.split())
        same(missing, set())
    for path in (sys.executable, world.path):
        same(await world.box.sh(f"[ -e {path} ] || echo absent"), "absent")


@promises.add(
    "FS-006",
    "Nothing that the host keeps in its home, temporary or working directory is visible.",
    exempt=NOT_LOCAL,
)
async def host_files(world: World) -> None:
    paths = " ".join(f"'{path}'" for path in (*world.planted.files, world.path))
    expect(bool(world.planted.files), "nothing could be planted")
    await world.box.nothing(f"for path in {paths}; do [ -e $path ] && echo $path; done")


@promises.add("FS-007", "The host's secrets in /etc cannot be read.", needs=(NO_IMAGE,), exempt=NOT_LOCAL)
async def etc(world: World) -> None:
    await world.box.nothing("""
for file in shadow shadow- gshadow sudoers ssh/ssh_host_rsa_key ssh/ssh_host_ed25519_key machine-id \
    hosts.allow krb5.keytab fstab crypttab environment apptainer/apptainer.conf; do
    ( : < /etc/$file ) && echo $file; done
[ -d /etc/ssl/private ] && echo ssl/private
""")


@promises.add(
    "FS-008",
    "Nothing of the host's /root, /boot, /sys, /var and /srv is visible.",
    needs=(NO_IMAGE,),
    exempt=NOT_LOCAL,
)
async def folders(world: World) -> None:
    await world.box.nothing(
        "for entry in /root/* /root/.[a-z]* /boot/* /sys/* /var/log/* /var/lib/* /srv/* /mnt/* /media/*; do "
        "[ -e $entry ] && echo $entry; done"
    )


@promises.add("FS-009", "No path leads above the root.", exempt=NOT_LOCAL)
async def above(world: World) -> None:
    paths = " ".join(f"'{path}'" for path in world.planted.files)
    await world.box.nothing(f"""
cd / && cd ../../../../.. && for p in {paths}; do [ -e .$p ] && echo $p; [ -e /../..$p ] && echo $p; done
for name in oldroot newroot .oldroot old_root; do [ -e /$name/etc ] && echo $name; done
for file in /proc/[0-9]*; do for p in {paths}; do for l in root cwd root/.. cwd/../../../..; do
    [ -e $file/$l$p ] && echo $file/$l$p; done; done; done
""")


@promises.add("FS-010", "A mount can be read and not written.", exempt=NOT_LOCAL)
async def read_only(world: World) -> None:
    async with mounted(world) as (box, source):
        same(await box.sh("read -r x < /opt/tree/file; echo $x"), "original")
        await box.nothing(
            f"{WRITE}\nfor path in /opt/tree/file /opt/tree/new /opt/tree/folder/new; do w $path; done"
        )
        same((source / "file").read_text(), "original\n")


@promises.add("FS-011", "A single file can be mounted, and not written.", exempt=NOT_LOCAL)
async def one_file(world: World) -> None:
    mount = Mount(source=tree(world) / "file", target="/opt/one")
    async with world.fresh(mounts=(mount,)) as box:
        same(await box.sh("read -r x < /opt/one; echo $x"), "original")
        await box.nothing(f"{WRITE}\nw /opt/one")


@promises.add("FS-012", "A writable mount is the host's directory itself.", exempt=NOT_LOCAL)
async def writable_mount(world: World) -> None:
    async with mounted(world, writable=True) as (box, source):
        await box.sh("echo changed > /opt/tree/file")
        same((source / "file").read_text(), "changed\n")


@promises.add(
    "FS-013",
    "An overlay can be changed in every way, and its source never changes.",
    exempt=NOT_LOCAL,
    needs=("rm", "mv", "mkdir", "chmod"),
)
async def overlay(world: World) -> None:
    async with mounted(world, overlay=True) as (box, source):
        before = digest(source)
        script = (
            "cd /opt/tree && echo changed > file && rm -r folder && mv file moved && mkdir folder "
            "&& chmod 700 moved"
        )
        same(await box.sh(f"{script} && read -r x < moved && echo $x *"), "changed folder moved")
        same(digest(source), before)


@promises.add(
    "FS-014", "Two sandboxes with the same overlay do not see each other's changes.", exempt=NOT_LOCAL
)
async def two_overlays(world: World) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree", overlay=True),)
    async with world.fresh(mounts=mounts) as one, world.fresh(mounts=mounts) as two:
        await one.sh("echo one > /opt/tree/file; echo one > /opt/tree/one")
        same(await two.sh("read -r x < /opt/tree/file; cd /opt/tree; echo $x *"), "original file folder")


@promises.add(
    "FS-015", "A descriptor of a read-only file cannot be opened again for writing.", exempt=NOT_LOCAL
)
async def reopen(world: World) -> None:
    async with mounted(world) as (box, source):
        await box.nothing(
            f"{WRITE}\nexec 3< /opt/tree/file; w /proc/self/fd/3; w /dev/fd/3; w /proc/thread-self/fd/3"
        )
        same((source / "file").read_text(), "original\n")


@promises.add(
    "FS-016",
    "A read-only mount cannot be changed by hard links, names, modes or times.",
    exempt=NOT_LOCAL,
    needs=("ln", "mv", "rm", "chmod", "touch"),
)
async def other_changes(world: World) -> None:
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
    exempt=NOT_LOCAL,
    needs=(PYTHON,),
    harmful=True,
)
async def remount(world: World) -> None:
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


@promises.add("FS-018", "A mask hides what is below it.", exempt=NOT_LOCAL)
async def mask(world: World) -> None:
    mounts = (Mount(source=tree(world), target="/opt/tree"),)
    async with world.fresh(mounts=mounts, masks=("/opt/tree/folder/secret",)) as box:
        await box.nothing(
            "for entry in /opt/tree/folder/secret/* /opt/tree/folder/secret/.[a-z]*; do "
            "[ -e $entry ] && echo $entry; done"
        )
        same(await box.sh("[ -d /opt/tree/folder/secret ] && echo there"), "there")


@promises.add(
    "FS-019",
    "A mask cannot be written, moved or removed.",
    exempt=NOT_LOCAL,
    needs=("mv", "rmdir", "mkdir", "chmod"),
)
async def mask_stays(world: World) -> None:
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
    "FS-020",
    "Sandboxes share no file of their working directories, homes, /tmp, /run and /dev/shm.",
    harmful=True,
    exempt=NOT_LOCAL,
)
async def between(world: World) -> None:
    places = '. "$HOME" /tmp /dev/shm /run'
    async with world.fresh() as one, world.fresh() as two:
        await one.sh(f'for d in {places}; do echo x > "$d/of-one"; done')
        await two.nothing(f'for d in {places}; do [ -e "$d/of-one" ] && echo "$d"; done')
        same(await one.sh("[ -e /tmp/of-one ] && echo there"), "there")


@promises.add(
    "FS-021",
    "No disk, memory or kernel log of the host is among the devices.",
    harmful=True,
    exempt=NOT_LOCAL,
)
async def devices(world: World) -> None:
    await world.box.nothing("""
for entry in /dev/* /dev/*/*; do [ -b $entry ] && ( : < $entry ) && echo $entry; done
for name in mem kmem port kmsg kvm vhost-net uinput snapshot nvram rtc0 hwrng userfaultfd; do
    ( : < /dev/$name ) && echo $name; done
""")


@promises.add(
    "FS-022",
    "A link inside never leads a read or write of the tools out to the host.",
    exempt=NOT_LOCAL,
    needs=("ln",),
)
async def tool_links(world: World) -> None:
    target = world.path / secrets.token_hex(4)
    target.write_text("the host's")
    async with world.fresh() as box:
        await box.sh(f"ln -s {target} link; ln -s {target.parent} folder")
        paths = [await box.path(name) for name in ("link", f"folder/{target.name}")]
        for path in paths:
            found = b""
            with contextlib.suppress(OSError):
                found = await box.tools.read(path)
            same(found, b"")
        for path in paths:
            with contextlib.suppress(OSError):  # or it makes one of that name inside
                await box.tools.write(path, b"written")
    same(target.read_text(), "the host's")


@promises.add("FS-023", "Names of any bytes can be used.")
async def names(world: World) -> None:
    async with world.fresh() as box:
        same(await box.sh('n=$(printf \'a\\nb\\377 *\'); echo x > "$n" && read -r x < "$n" && echo $x'), "x")


@promises.add("FS-024", "An image of one static program and no bash or Python is enough.", exempt=NOT_LOCAL)
async def small_image(world: World) -> None:
    busybox = next((p for p in map(Path, ("/bin/busybox", "/usr/bin/busybox")) if p.exists()), None)
    if busybox is None:
        raise Untried("there is no busybox to make an image of")
    image = world.path / "small"
    for folder in ("bin", "etc", "tmp", "proc", "dev", "run", "home"):
        (image / folder).mkdir(parents=True)
    (image / "bin/sh").write_bytes(busybox.read_bytes())
    (image / "bin/sh").chmod(0o755)
    sandbox = await world.driver.start(SandboxSpec(image=image))
    try:
        tools = await world.tools(sandbox)
        try:
            done = await tools.run(["/bin/sh", "-c", "echo $((6 * 7)); pwd"], timeout_s=30)
            same(done.output, b"42\n/workspace\n")
        finally:
            await tools.aclose()
    finally:
        await sandbox.close()


@promises.add(
    "FS-025",
    "Without an image, nothing can be put among the devices.",
    needs=(NO_IMAGE,),
    exempt={**NOT_LOCAL, "instance": "has Apptainer's /dev, which lies in memory of the sandbox's own"},
)
async def own_devices(world: World) -> None:
    await world.box.nothing(f"{WRITE}\nw /dev/x")


#: Opens each of a sandbox's own directories, and tries what not every file system can do.
_OWN = """
import contextlib, fcntl, os, stat, struct
GET, SET, NO_DUMP = 0x80086601, 0x40086602, 0x40  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
own = [os.open(path, os.O_RDONLY) for path in (os.environ["HOME"], "/tmp", os.getcwd())]
def flags(fd):
    return struct.unpack("q", fcntl.ioctl(fd, GET, bytes(8)))[0]
def tried(call):
    with contextlib.suppress(OSError):
        return call()
"""
_SEEN = f"""{_OWN}
for fd in own:
    print(stat.filemode(os.fstat(fd).st_mode), os.listdir(fd))
    print(tried(lambda: os.listxattr(fd)), tried(lambda: flags(fd)))
"""
_GIVEN = f"""{_OWN}
for fd in own:
    os.makedirs(f"/proc/self/fd/{{fd}}/deep/er")
    tried(lambda: os.setxattr(fd, "user.given", b"on"))
    tried(lambda: fcntl.ioctl(fd, SET, struct.pack("q", flags(fd) | NO_DUMP)))
    os.fchmod(fd, 0)
print("given")
"""


@promises.add(
    "FS-026",
    "Nothing that a sandbox gave its directories is found by the next.",
    needs=(PYTHON,),
    exempt=NOT_LOCAL,
    harmful=True,
)
async def inherited(world: World) -> None:
    said = []
    async with world.own_driver() as (driver, _):
        for code in (_SEEN, _GIVEN, _SEEN):
            async with world.fresh(python=True, driver=driver) as box:
                done = await box.tools.run([box.python, "-I", "-c", code], timeout_s=TIMEOUT_S)
            said.append(done.output)
    same(said[1], b"given\n")
    same(said[2], said[0])
