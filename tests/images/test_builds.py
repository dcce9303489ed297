"""Images built by the installed Apptainer. The leak fixture checks each test."""

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from prorl_envs.errors import InputError, SandboxError
from prorl_envs.images.apptainer import Rights, failure
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.inspect import inspect
from prorl_envs.images.modes import ImageMode
from prorl_envs.images.store import ImageStore
from prorl_envs.images.supervised import BuildLimits, environment
from prorl_envs.images.template import ImageTemplate
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.sif import labels
from tests.images.conftest import SAYING, Writer, names, write_docker_archive, write_oci_archive
from tests.sandbox.rootfs import missing_for_sif
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio


def saying(rootfs: Path, word: str = "hello", version: str = "1", **more: object) -> ImageTemplate:
    variables = {"base": str(rootfs), "word": word}
    return ImageTemplate(
        name="saying", version=version, definition=SAYING, variables=variables, **more  # type: ignore[arg-type]
    )  # fmt: skip


def content(sif: Path, name: str) -> str:
    """Read one file of an image."""
    offset = json.loads(inspect(ImageStore(sif.parent), str(sif)))["system"]["offset"]
    done = subprocess.run(
        ["unsquashfs", "-q", "-o", str(offset), "-cat", str(sif), name], capture_output=True, check=True
    )
    return done.stdout.decode()


async def built(builder: ImageBuilder, source: object, mode: ImageMode = ImageMode.LOCK) -> Path:
    path = await builder.resolve(source, mode)  # type: ignore[arg-type]
    assert path is not None
    return path


async def test_some_sources_need_no_build(builder: ImageBuilder, rootfs: Path, store: ImageStore) -> None:
    assert await builder.resolve(None) is None
    assert await builder.resolve("host") is None
    assert await builder.resolve(rootfs) == rootfs
    assert store.entries() == []


async def test_a_tar_becomes_an_image_once(
    builder: ImageBuilder, rootfs_tar: Path, store: ImageStore, scratch: Path
) -> None:
    first = await built(builder, rootfs_tar)
    assert content(first, "etc/image") == "from the image\n"
    assert await built(builder, str(rootfs_tar)) == first
    assert await built(builder, first) == first  # a SIF is used as it is
    again = await built(builder, rootfs_tar, ImageMode.REBUILD)
    assert again != first
    assert content(first, "etc/image")  # a process that has mounted it keeps it
    assert await built(builder, rootfs_tar) == again
    assert len(store.entries()) == 2
    assert names(scratch) == []


@pytest.mark.parametrize("write", [write_oci_archive, write_docker_archive])
async def test_container_archives_are_built(
    builder: ImageBuilder, layer: bytes, tmp_path: Path, write: Writer
) -> None:
    archive = write(tmp_path / "a:b c.tar", layer)
    assert content(await built(builder, archive), "etc/image") == "from the image\n"


async def test_an_oci_layout_is_built(builder: ImageBuilder, layer: bytes, tmp_path: Path) -> None:
    with tarfile.open(write_oci_archive(tmp_path / "oci.tar", layer)) as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    assert content(await built(builder, tmp_path / "layout"), "etc/image") == "from the image\n"


async def test_a_hostile_tar_writes_no_file_outside(
    builder: ImageBuilder, rootfs_tar: Path, tmp_path: Path, scratch: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    hostile = tmp_path / "hostile.tar"
    shutil.copy(rootfs_tar, hostile)
    with tarfile.open(hostile, "a") as archive:
        link = tarfile.TarInfo("opt/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(target)
        archive.addfile(link)
        for name in ("opt/link/through", f"../../../../../../..{target}/up", str(target / "absolute")):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
    with contextlib.suppress(SandboxError):
        await built(builder, hostile)
    assert names(target) == []
    assert names(scratch) == []


async def test_a_damaged_archive_is_refused_with_the_builders_message(
    builder: ImageBuilder, layer: bytes, tmp_path: Path, scratch: Path, store: ImageStore
) -> None:
    archive = write_oci_archive(tmp_path / "oci.tar", layer)
    data = bytearray(archive.read_bytes())
    data[1024 : 1024 + 4096] = bytes(4096)
    archive.write_bytes(data)
    with pytest.raises((SandboxError, InputError), match=r"end of its output|not an image|neither"):
        await built(builder, f"oci-archive:{archive}")
    assert names(scratch) == []
    assert store.entries() == []


async def test_a_template_is_built_from_the_files_it_names(
    builder: ImageBuilder, rootfs: Path, tmp_path: Path
) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("in a tree\n")
    (tmp_path / "extra").write_text("extra\n")
    files = {"/opt/extra": Path("extra"), "/opt/tree": tmp_path / "tree"}
    image = await built(builder, saying(rootfs, files=files, folder=tmp_path))
    assert content(image, "etc/said") == "hello\n"
    assert content(image, "opt/extra") == "extra\n"
    assert content(image, "opt/tree/sub/file") == "in a tree\n"
    said = labels(image)
    assert (said["prorl.template"], said["prorl.version"], said["maker"]) == ("saying", "1", "somebody")


async def test_a_template_may_be_based_on_an_image(builder: ImageBuilder, rootfs_tar: Path) -> None:
    """The base has a file of another owner; its build needs subordinate ids or a namespace with all ids."""
    base = rootfs_tar.with_name("owners.tar")
    shutil.copy(rootfs_tar, base)
    with tarfile.open(base, "a") as archive:
        member = tarfile.TarInfo("etc/shadow")
        member.gid, member.size = 42, 2
        archive.addfile(member, io.BytesIO(b"x\n"))
    image = await built(builder, saying(await built(builder, base)))
    assert content(image, "etc/said") == "hello\n"
    assert content(image, "etc/shadow") == "x\n"


async def test_an_archive_can_be_a_templates_base(
    builder: ImageBuilder, layer: bytes, tmp_path: Path, store: ImageStore
) -> None:
    write_oci_archive(tmp_path / "base.tar", layer)
    definition = "Bootstrap: oci-archive\nFrom: base.tar\n\n%post\n    echo made > /etc/made\n"
    template = ImageTemplate(name="t", version="1", definition=definition, folder=tmp_path)
    assert content(await built(builder, template), "etc/made") == "made\n"
    assert len(store.entries()) == 2  # the base is kept too


async def test_reuse_by_lock_compares_all_content(
    builder: ImageBuilder, rootfs: Path, tmp_path: Path, store: ImageStore
) -> None:
    base = tmp_path / "base"
    shutil.copytree(rootfs, base, symlinks=True)
    (tmp_path / "extra").write_text("1")
    files = {"/opt/extra": tmp_path / "extra"}
    first = await built(builder, saying(base, files=files))
    assert await built(builder, saying(base, files=files)) == first
    (tmp_path / "extra").write_text("2")
    second = await built(builder, saying(base, files=files))
    (base / "etc" / "image").write_text("another base\n")
    third = await built(builder, saying(base, files=files))
    assert len({first, second, third, await built(builder, saying(base, "bye", files=files))}) == 4
    assert content(third, "etc/image") == "another base\n"


async def test_reuse_by_version_compares_only_name_and_version(builder: ImageBuilder, rootfs: Path) -> None:
    first = await built(builder, saying(rootfs), ImageMode.VERSION)
    assert await built(builder, saying(rootfs, "changed"), ImageMode.VERSION) == first
    assert await built(builder, saying(Path("/absent"), "changed"), ImageMode.VERSION) == first
    second = await built(builder, saying(rootfs, "changed", version="2"), ImageMode.VERSION)
    assert content(second, "etc/said") == "changed\n"
    assert await built(builder, saying(rootfs), ImageMode.REBUILD) != first


async def test_a_failing_build_gives_a_bounded_reason(
    builder: ImageBuilder, rootfs: Path, scratch: Path
) -> None:
    loud = "head -c 3000000 /dev/zero | tr '\\0' x; echo; printf '\\033[31mthe reason\\n' >&2; exit 3"
    definition = f"Bootstrap: localimage\nFrom: {rootfs}\n\n%post\n    {loud}\n"
    with pytest.raises(SandboxError, match="the reason") as caught:
        await built(builder, ImageTemplate(name="t", version="1", definition=definition))
    assert len(caught.value.message) < 5000
    assert "\x1b" not in caught.value.message
    assert names(scratch) == []


ENDLESS = (
    "Bootstrap: localimage\nFrom: {rootfs}\n\n%post\n    (setsid sleep 600 &); echo started; sleep 601\n"
)


async def test_a_build_over_its_time_is_stopped(
    apptainer: str, store: ImageStore, rootfs: Path, scratch: Path
) -> None:
    builder = ImageBuilder(store, scratch=scratch, limits=BuildLimits(seconds=5))
    template = ImageTemplate(name="t", version="1", definition=ENDLESS.format(rootfs=rootfs))
    with pytest.raises(SandboxError, match="more than 5 s"):
        await built(builder, template)
    assert names(scratch) == []


async def test_a_build_that_would_fill_the_disk_is_stopped(
    apptainer: str, store: ImageStore, rootfs: Path, scratch: Path
) -> None:
    builder = ImageBuilder(store, scratch=scratch, limits=BuildLimits(free_bytes=1 << 60))
    with pytest.raises(SandboxError, match="too little disk space"):
        await built(builder, saying(rootfs))
    assert names(scratch) == []


async def test_a_cancelled_build_leaves_no_file(
    apptainer: str, store: ImageStore, rootfs: Path, scratch: Path
) -> None:
    started = asyncio.Event()

    def progress(line: str) -> None:
        if "sleep 60" in line:  # either may be the last message
            started.set()

    builder = ImageBuilder(store, scratch=scratch, progress=progress)
    template = ImageTemplate(name="t", version="1", definition=ENDLESS.format(rootfs=rootfs))
    building = asyncio.create_task(builder.resolve(template))
    await started.wait()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert names(scratch) == []
    assert names(store.root / "locks") == []


async def test_a_build_whose_supervisor_was_killed_fails(
    apptainer: str, store: ImageStore, rootfs: Path, scratch: Path
) -> None:
    killed: list[str] = []

    def kill_supervisor(line: str) -> None:
        if "sleep 2" in line and not killed:
            (work,) = names(scratch)
            found = [pid for pid in names(Path("/proc")) if pid.isdigit() and _supervises(int(pid), work)]
            killed.extend(found)
            os.kill(int(found[0]), signal.SIGKILL)

    builder = ImageBuilder(store, scratch=scratch, progress=kill_supervisor)
    definition = f"Bootstrap: localimage\nFrom: {rootfs}\n\n%post\n    sleep 2\n    exit 1\n"
    with pytest.raises(SandboxError, match="status"):
        await built(builder, ImageTemplate(name="t", version="1", definition=definition))
    assert len(killed) == 1


BUILD = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.store import ImageStore
from prorl_envs.images.template import ImageTemplate

cache, scratch, definition = map(Path, sys.argv[1:])
say = lambda line: print(line, flush=True)
builder = ImageBuilder(ImageStore(cache), scratch=scratch, progress=say)
template = ImageTemplate.read(definition)
print("image", asyncio.run(builder.resolve(template)), flush=True)
"""


def build_elsewhere(store: ImageStore, scratch: Path, definition: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", BUILD, str(store.root), str(scratch), str(definition)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_two_processes_that_need_one_image_build_it_once(
    apptainer: str, store: ImageStore, rootfs: Path, scratch: Path, tmp_path: Path
) -> None:
    definition = tmp_path / "t.def"
    definition.write_text(f"Bootstrap: localimage\nFrom: {rootfs}\n\n%post\n    echo one > /etc/said\n")
    with contextlib.ExitStack() as stack:
        builders = [stack.enter_context(build_elsewhere(store, scratch, definition)) for _ in range(3)]
        outputs = [process.communicate()[0] for process in builders]
    images = {line for output in outputs for line in output.splitlines() if line.startswith("image ")}
    assert len(images) == 1
    assert sum("Build complete" in output for output in outputs) == 1
    assert len(store.entries()) == 1
    assert names(scratch) == []


async def test_a_killed_builder_does_not_block_the_next(
    builder: ImageBuilder, store: ImageStore, rootfs: Path, scratch: Path, tmp_path: Path
) -> None:
    definition = tmp_path / "t.def"
    gate = tmp_path / "gate"
    gate.write_text("echo started\nexec sleep 600\n")
    definition.write_text(
        f"Bootstrap: localimage\nFrom: {rootfs}\n\n%files\n    gate /gate\n%post\n    sh /gate\n"
    )
    with build_elsewhere(store, scratch, definition) as killed:
        assert killed.stdout is not None
        while "started" not in await asyncio.to_thread(killed.stdout.readline):
            assert killed.poll() is None
        (work,) = names(scratch)
        gone = [pid for pid in names(Path("/proc")) if pid.isdigit() and _works_in(int(pid), work)]
        assert gone
        killed.kill()
    while any(_works_in(int(pid), work) for pid in gone):
        await asyncio.to_thread(os.sched_yield)
    assert len(names(store.root / "locks")) == 1
    gate.write_text("true")
    image = await built(builder, ImageTemplate.read(definition))
    assert image.exists()
    while names(scratch):  # the killed builder's supervisor removes its files
        await asyncio.to_thread(os.sched_yield)


def _works_in(pid: int, folder: str) -> bool:
    try:
        return folder in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def _supervises(pid: int, folder: str) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return "images.supervisor" in command and folder in command


async def test_a_built_image_runs_in_a_sandbox(run_dir: Path, builder: ImageBuilder, rootfs: Path) -> None:
    if reason := missing_for_sif():
        pytest.skip(reason)
    image = await built(builder, saying(rootfs))
    driver = BubblewrapDriver(templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec(image=image))
        assert await run_script(sandbox, "cat /etc/said") == "hello\n"
    finally:
        await driver.aclose()


async def test_a_missing_builder_is_reported(store: ImageStore, rootfs_tar: Path, scratch: Path) -> None:
    builder = ImageBuilder(store, scratch=scratch, environ={"PATH": "/absent"})
    with pytest.raises(SandboxError, match="neither Apptainer nor Singularity"):
        await built(builder, rootfs_tar)


def test_a_builder_sees_no_secrets(tmp_path: Path) -> None:
    host = {
        "PATH": "/bin", "HOME": "/home/me", "AWS_SECRET_ACCESS_KEY": "s", "OPENAI_API_KEY": "s",
        "APPTAINER_DOCKER_PASSWORD": "p", "APPTAINER_BINDPATH": "/", "https_proxy": "http://proxy",
    }  # fmt: skip
    local = environment(tmp_path, host, remote=False)
    assert not {"AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "APPTAINER_DOCKER_PASSWORD"} & local.keys()
    assert "APPTAINER_BINDPATH" not in local
    assert (local["HOME"], local["https_proxy"]) == (str(tmp_path), "http://proxy")
    assert local["APPTAINER_CACHEDIR"] == local["SINGULARITY_CACHEDIR"] == str(tmp_path / "cache")
    remote = environment(tmp_path, host, remote=True)
    assert (remote["APPTAINER_DOCKER_PASSWORD"], remote["HOME"]) == ("p", "/home/me")


@pytest.mark.parametrize(
    ("may", "identity", "unpack"),
    [
        (Rights(root=True, capable=True, subordinate=False), False, False),
        (Rights(root=True, capable=False, subordinate=False), True, False),
        (Rights(root=False, capable=False, subordinate=True), False, False),
        (Rights(root=False, capable=False, subordinate=False), False, True),
    ],
)
def test_the_builder_is_chosen_by_the_definition(may: Rights, identity: bool, unpack: bool) -> None:
    assert (may.identity, may.unpack_base) == (identity, unpack)


def test_a_build_without_user_namespaces_suggests_another_machine() -> None:
    """A setuid Apptainer fails with this error if the kernel refuses user namespaces."""
    said = "FATAL:   /etc/subuid mapping found but no user namespace available for fakeroot"
    assert "build on another" in failure("apptainer build", 255, said, remote=False).hint
