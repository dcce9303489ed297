"""The image commands, as a user types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.rootfs import write_busybox_rootfs

PROGRAM = Path(sys.executable).parent / "prorl-envs"


def run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PRORL_IMAGE_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"}
    return subprocess.run(
        [PROGRAM, "image", *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.thorough
def test_build_list_inspect_prune(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None or not (shutil.which("apptainer") or shutil.which("singularity")):
        pytest.skip("no busybox, or no apptainer")
    write_busybox_rootfs(tmp_path / "root", busybox)
    definition = tmp_path / "task.def"
    definition.write_text("Bootstrap: localimage\nFrom: root\n\n%post\n    echo {{ word }} > /etc/said\n")
    build: list[str | Path] = ["build", definition, "--set", "word=hello", "--version", "3"]
    first, second = run(tmp_path, *build), run(tmp_path, *build)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    image = Path(first.stdout.strip())
    assert image.is_file()
    assert image.parent.name in run(tmp_path, "list").stdout
    found = json.loads(run(tmp_path, "inspect", image.parent.name).stdout)
    assert found["labels"]["prorl.version"] == found["entry"]["version"] == "3"
    assert json.loads(run(tmp_path, "inspect", image).stdout)["labels"] == found["labels"]
    assert run(tmp_path, "prune", "--keep-gib", "0", "--unused-days", "0").stdout == f"{image.parent.name}\n"
    assert not image.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "absent.tar"], "no such image"),
        (["build", "ftp://x/y"], "unknown source"),
        (["build", "absent.def"], "cannot read the definition"),
        (["build", "host", "--name", "x"], "are for definitions"),
        (["build", "x.def", "--set", "novalue"], "NAME=VALUE"),
        (["pull", "busybox"], "not an address"),
        (["inspect", "absent"], "no such image"),
        (["inspect", "/etc/passwd"], "not an image"),
    ],
)
def test_wrong_input_is_told_in_a_line_and_a_hint(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
