"""Kinds of image sources, and how they are distinguished. No builder is needed."""

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.images.archive import write_layout
from prorl_envs.images.sources import Source, SourceKind, parse_source
from tests.images.conftest import write_docker_archive, write_oci_archive


def test_empty_and_host_mean_the_hosts_own_system() -> None:
    assert parse_source(None).kind is parse_source("host").kind is SourceKind.HOST


@pytest.mark.parametrize(
    "address", ["docker://busybox", "oras://reg.example/a/b:1", "library://u/c/i@sha256:0"]
)
def test_addresses_are_recognised(address: str) -> None:
    assert parse_source(address) == Source(SourceKind.REMOTE, address)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://host/image", "unknown source"),
        ("shub://a/b", "unknown source"),
        ("docker://", "not an image's address"),
        ("docker://-o", "not an image's address"),
        ("docker://a b", "not an image's address"),
        ("docker://a\n%post", "not an image's address"),
        ("", "empty"),
        ("a\0b", "empty, or not a path"),
        ("/absent/image.sif", "no such image"),
        ("oci:/absent", "no such image"),
    ],
)
def test_bad_sources_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_source(text)


def test_files_are_recognised_by_their_content(rootfs: Path, rootfs_tar: Path, tmp_path: Path) -> None:
    layer = rootfs_tar.read_bytes()
    assert parse_source(rootfs) == Source(SourceKind.DIRECTORY, str(rootfs))
    assert parse_source(str(rootfs_tar)).kind is SourceKind.TAR
    assert parse_source(write_oci_archive(tmp_path / "a", layer)).kind is SourceKind.OCI_ARCHIVE
    assert parse_source(write_docker_archive(tmp_path / "b", layer)).kind is SourceKind.DOCKER_ARCHIVE
    with tarfile.open(tmp_path / "a") as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    assert parse_source(tmp_path / "layout").kind is SourceKind.OCI_LAYOUT
    assert parse_source(f"dir:{tmp_path / 'layout'}").kind is SourceKind.DIRECTORY


@pytest.mark.parametrize(
    "content", [b"", b"no image", b"\x1f\x8b damaged", b"BZh", b"\xfd7zXZ\0", b"\0" * 4096]
)
def test_files_that_are_not_archives_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=r"not an image|neither"):
        parse_source(tmp_path / "file")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_layer_is_the_tar_unpacked(layer: bytes, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(pack(layer))
    assert parse_source(path).kind is SourceKind.TAR
    write_layout(path, tmp_path / "layout", limit=1 << 30)
    blobs = list((tmp_path / "layout" / "blobs" / "sha256").iterdir())
    assert layer in [path.read_bytes() for path in blobs]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_tar_larger_than_the_limit_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(pack(bytes(1 << 20)))
    with pytest.raises(InputError, match="more than 100000 bytes"):
        write_layout(path, tmp_path / "layout", limit=100_000)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_compressed_tar_is_refused(
    layer: bytes, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "root.tar"
    path.write_bytes(pack(layer)[:-1000])
    with pytest.raises(InputError, match="cannot unpack"):
        write_layout(path, tmp_path / "layout", limit=1 << 30)
