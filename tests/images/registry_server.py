"""Real registries for tests: Debian's docker-registry, with images made by umoci and pushed by skopeo."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER, PASSWORD = "somebody", "a password"
_PASSWORD_HASH = "$2b$04$SIwuGexEHdtWT6uezekYH.Ru3K4dJehLYqTUJS9TELr/twUE9bnke"  # bcrypt of PASSWORD
_LISTENING = re.compile(rb"listening on 127\.0\.0\.1:(\d+)")
_PROGRAMS = ("docker-registry", "skopeo", "umoci")


def skip_without_registry() -> None:
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)}: not installed (Debian packages of these names)")


@contextmanager
def docker_registry(folder: Path, *, password: bool = False) -> Iterator[str]:
    """Run a registry that stores its images in a folder; yield its host and port."""
    skip_without_registry()
    settings: dict[str, object] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": "127.0.0.1:0"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    if password:
        (folder / "htpasswd").write_text(f"{USER}:{_PASSWORD_HASH}\n")
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    with subprocess.Popen(
        ["docker-registry", "serve", folder / "config.yml"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := _LISTENING.search(line):
                    yield f"127.0.0.1:{found[1].decode()}"
                    break
            else:
                pytest.fail("docker-registry did not start")
        finally:
            process.kill()


def run_program(*arguments: str | Path) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def push(layout: str, address: str, *options: str) -> None:
    """Push an image of an OCI layout (`FOLDER:TAG`) to `HOST:PORT/NAME:TAG`."""
    run_program(
        "skopeo", "--insecure-policy", "copy", "--dest-tls-verify=false", *options,
        f"oci:{layout}", f"docker://{address}",
    )  # fmt: skip


def write_layered_layout(folder: Path, rootfs: Path) -> str:
    """Make an image of three layers with umoci: files, removed files, and a replaced directory.

    Returns:
        `FOLDER:TAG`; beside the folder is `bundle/rootfs`, the image unpacked.
    """
    layout, bundle = folder / "layout", folder / "bundle"
    run_program("umoci", "init", "--layout", layout)
    run_program("umoci", "new", "--image", f"{layout}:1")
    run_program("umoci", "unpack", "--rootless", "--image", f"{layout}:1", bundle)
    root = bundle / "rootfs"
    shutil.copytree(rootfs, root, symlinks=True, dirs_exist_ok=True)
    for name in ("kept", "removed", "tree/old", "tree/sub/deep", "gone/file"):
        (root / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "data" / name).write_text(f"{name}\n")
    (root / "data" / "hard").hardlink_to(root / "data" / "kept")
    (root / "data" / "program").write_text("#!/bin/sh\n")
    (root / "data" / "program").chmod(0o4755)
    _repack(layout, bundle)
    (root / "data" / "removed").unlink()
    shutil.rmtree(root / "data" / "gone")
    _repack(layout, bundle)
    shutil.rmtree(root / "data" / "tree")
    (root / "data" / "tree").mkdir()
    (root / "data" / "tree" / "new").write_text("new\n")
    _repack(layout, bundle)
    run_program(
        "umoci", "config", "--image", f"{layout}:1", "--config.env", "A=b=c", "--config.workingdir", "/data",
        "--config.entrypoint", "/bin/sh", "--config.cmd", "-c",
    )  # fmt: skip
    return f"{layout}:1"


def _repack(layout: Path, bundle: Path) -> None:
    run_program("umoci", "repack", "--refresh-bundle", "--image", f"{layout}:1", bundle)
