"""Small root file systems, and archives of them."""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.store import ImageStore
from tests.sandbox.rootfs import write_busybox_rootfs

SAYING = """\
Bootstrap: localimage
From: {{ base }}

%post
    echo {{ word }} > /etc/said

%labels
    maker somebody
"""


@pytest.fixture(scope="session")
def rootfs(tmp_path_factory: pytest.TempPathFactory, busybox: str) -> Path:
    return write_busybox_rootfs(tmp_path_factory.mktemp("rootfs") / "root", busybox)


@pytest.fixture(scope="session")
def rootfs_tar(rootfs: Path) -> Path:
    path = rootfs.parent / "root.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(rootfs, ".")
    return path


@pytest.fixture(scope="session")
def layer(rootfs_tar: Path) -> bytes:
    """Tar of the root file system, the only layer of a container."""
    return rootfs_tar.read_bytes()


@pytest.fixture
def apptainer() -> str:
    found = shutil.which("apptainer") or shutil.which("singularity")
    if found is None:
        pytest.skip("neither apptainer nor singularity is installed")
    return found


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "cache")


@pytest.fixture
def scratch(run_dir: Path, tmp_path: Path) -> Path:
    """Directory of builds; it must be empty at the end of a test."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


@pytest.fixture
def builder(apptainer: str, store: ImageStore, scratch: Path) -> ImageBuilder:
    return ImageBuilder(store, scratch=scratch)


def names(folder: Path) -> list[str]:
    """Return the contents of a folder."""
    return sorted(path.name for path in folder.iterdir())


def blob(data: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def container(layer: bytes, env: Sequence[str] = ()) -> tuple[bytes, bytes, bytes]:
    """Return the configuration, manifest and index of a container with one plain layer and some variables."""
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Env": list(env)},
            "rootfs": {"type": "layers", "diff_ids": [digest]},
        }
    ).encode()
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": blob(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [blob(layer, "application/vnd.oci.image.layer.v1.tar")],
        }
    ).encode()
    return config, manifest, json.dumps({"schemaVersion": 2, "manifests": [blob(manifest, kind)]}).encode()


def write_oci_archive(path: Path, layer: bytes, env: Sequence[str] = ()) -> Path:
    config, manifest, index = container(layer, env)
    files = {f"blobs/sha256/{hashlib.sha256(data).hexdigest()}": data for data in (layer, config, manifest)}
    return _write_tar(path, files | {"index.json": index, "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'})


def write_docker_archive(path: Path, layer: bytes) -> Path:
    config, _, _ = container(layer)
    name, inner = f"{hashlib.sha256(config).hexdigest()}.json", f"{'0' * 64}/layer.tar"
    manifest = [{"Config": name, "RepoTags": ["x:latest"], "Layers": [inner]}]
    return _write_tar(path, {name: config, inner: layer, "manifest.json": json.dumps(manifest).encode()})


def _write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for folder in sorted({str(parent) for name in files for parent in Path(name).parents} - {"."}):
            member = tarfile.TarInfo(folder)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


Writer = Callable[[Path, bytes], Path]
