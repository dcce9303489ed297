"""Images for the conformance suite: the programs its probes use, and what this Python needs of a system."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

from tests.sandbox.rootfs import PROGRAMS, write_rootfs

_MORE = (
    "chmod", "head", "ln", "mkfifo", "mv", "nohup", "rmdir", "tail", "touch", "tr", "wc",
)  # fmt: skip


def write_image(root: Path) -> Path:
    """A root file system in which no promise lacks anything but the host's own system."""
    write_rootfs(root, (*PROGRAMS, *_MORE))
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")  # the base's, not a venv's
    listed = subprocess.run(["ldd", *modules], capture_output=True, text=True, check=False).stdout
    for library in {Path(word) for word in listed.split() if word.startswith(("/lib", "/usr/lib"))}:
        target = root / library.relative_to("/")
        if library.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return root
