"""Installation of packages that a test has created."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

UV = shutil.which("uv") or Path(sys.executable).with_name("uv")


def install(target: Path, *packages: Path) -> dict[str, str]:
    """Install packages beside ours. Return the environment variables that make Python find them."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([UV, "pip", "install", *options, "--target", target, *packages], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}
