"""Images for the conformance suite: the programs its probes use, and the libraries of this Python."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import zmq

from tests.sandbox.rootfs import PROGRAMS, write_rootfs

_MORE = (
    "chmod", "head", "ln", "mkfifo", "mv", "nohup", "rmdir", "tail", "touch", "tr", "wc",
)  # fmt: skip


def write_image(root: Path) -> Path:
    """Make a root file system for all promises except those about the host's system."""
    write_rootfs(root, (*PROGRAMS, *_MORE))
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")  # the base's, not a venv's
    messages = Path(zmq.__file__).parent.rglob("*.so")  # for a Jupyter kernel
    listed = subprocess.run(["ldd", *modules, *messages], capture_output=True, text=True, check=False).stdout
    for library in {Path(word) for word in listed.split() if word.startswith(("/lib", "/usr/lib"))}:
        target = root / library.relative_to("/")
        if library.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return root
