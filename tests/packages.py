"""Install packages that a test has made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

UV = shutil.which("uv") or Path(sys.executable).with_name("uv")


def install(target: Path, *packages: Path) -> dict[str, str]:
    """Install packages beside ours; return the environment variables with which Python finds them."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([UV, "pip", "install", *options, "--target", target, *packages], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}
