"""Promises about the file system: the files that a sandbox sees and can change, and isolation of changes."""

import contextlib
import hashlib
import os
import secrets
import sys
from pathlib import Path

from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.promise import (
    IMAGE,
    NO_IMAGE,
    NOT_LOCAL,
    PYTHON,
    Promises,
    PromiseSkipped,
    expect,
    same,
)
from prorl_envs.conformance.static_program import static_program
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.sandbox.base import SandboxSpec

promises = Promises("file systems", exempt=NOT_LOCAL)

#: `w PATH` prints PATH if it can be opened for writing. It writes nothing.
WRITE = 'w() { ( : >> "$1" ) 2>/dev/null && echo "$1 can be written"; }'


def digest(path: Path) -> str:
    """Return a digest of a file, or of all names, sizes and times in a directory."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    found = sorted(
        (str(p.relative_to(path)), s.st_size, s.st_mtime_ns, s.st_mode)
        for p in path.rglob("*")
        for s in [p.lstat()]
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()


@promises.add(
    "FS-001", "Working directory, home, /tmp and /dev/shm can be written.", needs=("rm",), exempt={}
)
async def writable(world: PromiseContext) -> None:
    name = secrets.token_hex(8)
    script = (
        f'for d in . "$HOME" /tmp /dev/shm; do echo x > "$d/{name}" && read -r x < "$d/{name}" && echo $x; '
        f'rm "$d/{name}"; done'
    )
    same(await world.box.sh(script), "x\nx\nx\nx")


promises.script(
    "FS-002",
    "Without an image, the system is read-only.",
    f"{WRITE}\nfor p in /x /usr/x /usr/bin/x /etc/x /etc/passwd /usr/bin/env /var/x /home/x; do w $p; done",
    needs=(NO_IMAGE,),
    harmful=True,
)


@promises.add(
    "FS-003",
    "With an image, its system can be changed, and no other sandbox sees the change.",
    needs=(IMAGE, "mkdir"),
)
async def image_changes(world: PromiseContext) -> None:
    async with world.fresh() as box, world.fresh() as other:
        same(await box.sh("mkdir /made && echo own > /made/file && read -r x < /made/file && echo $x"), "own")
        same(await other.sh("[ -e /made ] || echo absent"), "absent")
    async with world.fresh() as box:
        same(await box.sh("[ -e /made ] || echo absent"), "absent")


@promises.add("FS-004", "The image on the host never changes.", needs=(IMAGE, "rm"), harmful=True)
async def image_same(world: PromiseContext) -> None:
    assert world.subject.image is not None
    before = digest(world.subject.image)
    async with world.fresh() as box:
        await box.sh(
            "for p in /made /etc/passwd /bin/sh; do echo x > $p; done; "
            "rm -rf /etc /opt /bin /usr; echo x > /bin"
        )
    same(digest(world.subject.image), before)


@promises.add("FS-005", "With an image, the system is the image's.", needs=(IMAGE,))
async def image_seen(world: PromiseContext) -> None:
    image = world.subject.image
    assert image is not None
    inside = await world.box.sh("for entry in /*; do echo ${entry#/}; done")
    if image.is_dir():
        missing = {p.name for p in image.iterdir() if not p.name.startswith(".")} - set(inside.split())
        same(missing, set())
    for path in (sys.executable, world.path):
        same(await world.box.sh(f"[ -e {path} ] || echo absent"), "absent")


@promises.add("FS-006", "No file in the host's home, temporary or working directory is visible.")
async def host_files(world: PromiseContext) -> None:
    paths = " ".join(f"'{path}'" for path in (*world.planted.files, world.path))
    expect(bool(world.planted.files), "nothing could be planted")
    await world.box.nothing(f"for path in {paths}; do [ -e $path ] && echo $path; done")


promises.script(
    "FS-007",
    "The host's secrets in /etc cannot be read.",
    """
for file in shadow shadow- gshadow sudoers ssh/ssh_host_rsa_key ssh/ssh_host_ed25519_key machine-id \
    hosts.allow krb5.keytab fstab crypttab environment apptainer/apptainer.conf; do
    ( : < /etc/$file ) && echo $file; done
[ -d /etc/ssl/private ] && echo ssl/private
""",
    needs=(NO_IMAGE,),
)


promises.script(
    "FS-008",
    "Nothing of the host's /root, /boot, /sys, /var and /srv is visible.",
    "for entry in /root/* /root/.[a-z]* /boot/* /sys/* /var/log/* /var/lib/* /srv/* /mnt/* /media/*; do "
    "[ -e $entry ] && echo $entry; done",
    needs=(NO_IMAGE,),
)


@promises.add("FS-009", "No path leads above the root.")
async def above(world: PromiseContext) -> None:
    paths = " ".join(f"'{path}'" for path in world.planted.files)
    await world.box.nothing(f"""
cd / && cd ../../../../.. && for p in {paths}; do [ -e .$p ] && echo $p; [ -e /../..$p ] && echo $p; done
for name in oldroot newroot .oldroot old_root; do [ -e /$name/etc ] && echo $name; done
for file in /proc/[0-9]*; do for p in {paths}; do for l in root cwd root/.. cwd/../../../..; do
    [ -e $file/$l$p ] && echo $file/$l$p; done; done; done
""")


@promises.add(
    "FS-020",
    "Sandboxes share no file of their working directories, homes, /tmp, /run and /dev/shm.",
    harmful=True,
)
async def between(world: PromiseContext) -> None:
    places = '. "$HOME" /tmp /dev/shm /run'
    async with world.fresh() as one, world.fresh() as two:
        await one.sh(f'for d in {places}; do echo x > "$d/of-one"; done')
        await two.nothing(f'for d in {places}; do [ -e "$d/of-one" ] && echo "$d"; done')
        same(await one.sh("[ -e /tmp/of-one ] && echo there"), "there")


promises.script(
    "FS-021",
    "No disk, memory or kernel log of the host is among the devices.",
    """
for entry in /dev/* /dev/*/*; do [ -b $entry ] && ( : < $entry ) && echo $entry; done
for name in mem kmem port kmsg kvm vhost-net uinput snapshot nvram rtc0 hwrng userfaultfd; do
    ( : < /dev/$name ) && echo $name; done
""",
    harmful=True,
)


@promises.add(
    "FS-022", "A link inside never leads a read or write of the tools out to the host.", needs=("ln",)
)
async def tool_links(world: PromiseContext) -> None:
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
            with contextlib.suppress(OSError):  # a write fails, or creates a file inside
                await box.tools.write(path, b"written")
    same(target.read_text(), "the host's")


@promises.fresh("FS-023", "File names can have any bytes.", exempt={})
async def names(box: Probe) -> None:
    same(await box.sh('n=$(printf \'a\\nb\\377 *\'); echo x > "$n" && read -r x < "$n" && echo $x'), "x")


@promises.add("FS-024", "An image of one static program is enough.")
async def small_image(world: PromiseContext) -> None:
    image = world.path / "small"
    for folder in ("bin", "etc", "tmp", "proc", "dev", "run", "home"):
        (image / folder).mkdir(parents=True)
    try:
        (image / "bin/sh").write_bytes(static_program(os.uname().machine))
    except KeyError:
        raise PromiseSkipped(f"there is no program for {os.uname().machine}") from None
    (image / "bin/sh").chmod(0o755)
    async with world.started(SandboxSpec(image=image)) as box:
        same((await box.tools.run(["/bin/sh"], timeout_s=30)).output, b"ready\n")


#: Opens the sandbox's own directories. `tried` calls operations that not every file system supports.
_OWN = """
import contextlib, fcntl, os, stat, struct
GET, SET, NO_DUMP = 0x80086601, 0x40086602, 0x40  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
directories = [os.open(path, os.O_RDONLY) for path in (os.environ["HOME"], "/tmp", os.getcwd())]
def flags(fd):
    return struct.unpack("q", fcntl.ioctl(fd, GET, bytes(8)))[0]
def tried(call):
    with contextlib.suppress(OSError):
        return call()
"""
_SEEN = f"""{_OWN}
for fd in directories:
    print(stat.filemode(os.fstat(fd).st_mode), os.listdir(fd))
    print(tried(lambda: os.listxattr(fd)), tried(lambda: flags(fd)))
"""
_GIVEN = f"""{_OWN}
for fd in directories:
    os.makedirs(f"/proc/self/fd/{{fd}}/deep/er")
    tried(lambda: os.setxattr(fd, "user.given", b"on"))
    tried(lambda: fcntl.ioctl(fd, SET, struct.pack("q", flags(fd) | NO_DUMP)))
    os.fchmod(fd, 0)
print("given")
"""


@promises.add(
    "FS-026",
    "A sandbox finds nothing that an earlier one left in its directories.",
    needs=(PYTHON,),
    harmful=True,
)
async def inherited(world: PromiseContext) -> None:
    outputs = []
    async with world.own_driver() as (driver, _):
        for code in (_SEEN, _GIVEN, _SEEN):
            async with world.fresh(python=True, driver=driver) as box:
                done = await box.tools.run([box.python, "-I", "-c", code], timeout_s=TIMEOUT_S)
            outputs.append(done.output)
    same(outputs[1], b"given\n")
    same(outputs[2], outputs[0])


#: Writable mounts of a sandbox, without an image and with one.
_WRITABLE = {"/tmp", "/run", "/dev/shm", "/dev/pts"}
_DEVICES = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
_BELOW_DEV = {*_DEVICES, "/dev/pts", "/dev/shm"}
#: Mounts that Apptainer itself makes writable.
_OF_APPTAINER = {"/", "/etc/hostname", "/etc/resolv.conf", "/dev/mqueue", *_DEVICES}
#: Further writable mounts if an ordinary user runs Apptainer. Only root may make /proc and /dev read-only;
#: the others are the sandbox's own copies, in the same memory file system as /dev and /run.
_OF_USERS_APPTAINER = {"/proc", "/dev", "/etc/passwd", "/etc/group"}
#: bubblewrap mounts the overlay of an image without flags. Yet the kernel opens no device on a mount of a
#: user namespace, and ignores set-user-id bits after no-new-privileges.
_BY_BUBBLEWRAP = {"bubblewrap", "apptainer"}


@promises.add(
    "FS-027",
    "All mounts but the sandbox's own directories are read-only; none allows device or set-user-id files.",
)
async def mounts(world: PromiseContext) -> None:
    box = world.box
    writable = {*_WRITABLE, box.sandbox.spec.workdir, await box.sh("echo $HOME")}
    if world.subject.image is not None:
        writable.add("/")
    if world.subject.emulate_root:
        writable |= {"/etc/hosts", "/etc/hostname"}
    exceptions = set()
    if world.subject.driver == "apptainer-instance":
        exceptions = _OF_APPTAINER if os.geteuid() == 0 else _OF_APPTAINER | _OF_USERS_APPTAINER
    if world.subject.image is not None and world.subject.driver in _BY_BUBBLEWRAP:
        exceptions = {"/"}
    listed = await box.sh("while read -r line; do echo $line; done < /proc/self/mountinfo")
    for line in listed.splitlines():
        place, options = line.split()[4], set(line.split()[5].split(","))
        expect("ro" in options or place in writable | exceptions, f"{place} can be written")
        if place.startswith("/dev/") and world.subject.driver != "apptainer-instance":
            expect(place in _BELOW_DEV, f"{place} is a device that programs need not have")
        if place not in exceptions and not place.startswith("/dev"):
            expect({"nosuid", "nodev"} <= options, f"{place} has {sorted(options)}")
