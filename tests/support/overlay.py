"""Overlays of layers, mounted by the kernel for an ordinary user."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def show_overlay(layers: Sequence[Path], program: str) -> dict[str, str]:
    """Mount an overlay of layers at /mnt in new namespaces; return the JSON that a program prints there.

    Args:
        layers: the lowest first.
        program: Python code.
    """
    lower = ":".join(str(layer) for layer in reversed(layers))
    mount = 'mount -t overlay -o "userxattr,lowerdir=$1" none /mnt && exec "$2" -c "$3"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-ec", mount, "sh", lower, sys.executable, program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found
