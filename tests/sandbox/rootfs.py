"""Small images, built from this machine's own programs."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROGRAMS = ("sh", "bash", "cat", "id", "ls", "mkdir", "sleep", "setsid", "rm")
_FOLDERS = ("etc", "tmp", "proc", "dev", "run", "home", "opt")


def write_rootfs(root: Path, programs: tuple[str, ...] = PROGRAMS) -> Path:
    """Make a root file system with a few programs, their libraries, and the marker file `/etc/image`."""
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True)
    (root / "bin").mkdir()
    for program in programs:
        path = shutil.which(program)
        assert path is not None
        shutil.copy(path, root / "bin" / program)
        for library in _libraries(path):
            target = root / library.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (root / "etc" / "image").write_text("from the image\n")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def write_busybox_rootfs(root: Path, busybox: str) -> Path:
    """Make the smallest root file system: a static busybox."""
    write_rootfs(root, ())
    shutil.copy(busybox, root / "bin" / "busybox")
    for program in PROGRAMS:
        if program != "bash":
            (root / "bin" / program).symlink_to("busybox")
    return root


def build_sif(root: Path, sif: Path) -> Path:
    """Build a SIF of a root file system with Apptainer."""
    environment = {**os.environ, "APPTAINER_CACHEDIR": str(sif.parent), "APPTAINER_TMPDIR": str(sif.parent)}
    subprocess.run(
        ["apptainer", "build", str(sif), str(root)], check=True, capture_output=True, env=environment
    )
    return sif


def missing_for_sif() -> str:
    """Return the reason why this machine cannot build or mount a SIF; "" if it can."""
    for program in ("apptainer", "squashfuse_ll", "fusermount3"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "/dev/fuse is not accessible to this user"


def _libraries(program: str) -> set[Path]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    lines = (line for line in listed.splitlines() if "(0x" in line)  # others are warnings
    return {Path(word) for line in lines for word in line.split() if word.startswith("/")}


def write_python(root: Path, prefix: str, *, packages: tuple[str, ...] = ("ipykernel",)) -> None:
    """Copy this interpreter, its libraries and packages into an image.

    Args:
        root: the image.
        prefix: absolute path in the image; `python3` is in its `bin`.
    """
    target, stdlib = root / prefix.removeprefix("/"), Path(sysconfig.get_path("stdlib"))
    library = target / "lib" / stdlib.name
    unneeded = shutil.ignore_patterns(
        "__pycache__", "site-packages", "test", "idlelib", "tkinter", "config-*"
    )
    # In an unpacked Debian package, links into /etc lead nowhere.
    shutil.copytree(stdlib, library, ignore=unneeded, ignore_dangling_symlinks=True)
    (target / "bin").mkdir()
    executable = Path(sys.executable).resolve()
    shutil.copy(executable, target / "bin" / "python3")
    for found in _libraries(str(executable)):
        if found.name.startswith("libpython"):  # an executable may look for it relative to itself
            shutil.copy(found, target / "lib")
    # Packages beside the standard library: Debian's Python has no site-packages.
    for each in (found for name in packages for found in _closure(name)):
        for file in each.files or ():
            source = Path(str(each.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (library / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, library / file)
    for program in (target / "bin" / "python3", *target.rglob("*.so")):
        for found in _libraries(str(program)):
            if found.is_relative_to(target):
                continue
            if found.is_relative_to("/tmp"):
                pytest.skip(f"{found} is below /tmp, which every sandbox covers")
            inside = root / found.relative_to("/")
            if not inside.exists():
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, inside)


def _closure(name: str) -> list[Distribution]:
    """Return a distribution and the distributions that it requires on this machine."""
    found: dict[str, Distribution] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = distribution(one)
            wanted = map(Requirement, found[one].requires or ())
            waiting += [
                each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return list(found.values())
