"""Conversion of a tar of a root file system to an OCI layout of one layer.

Apptainer then unpacks it, as it does every container: it follows no link out of the image, and needs no
permission to create devices or to change owners. So only Apptainer processes hostile archives.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from prorl_envs.errors import InputError
from prorl_envs.images.digest import of_stream
from prorl_envs.images.registry.documents import host_architecture

_OPENERS: tuple[tuple[bytes, Any], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ\0", lzma.open),
)


def write_layout(tar: Path, folder: Path, *, limit: int) -> None:
    """Write the layout of `tar` to the new `folder`.

    Args:
        tar: plain tar, or one compressed by gzip, bzip2 or xz.
        limit: most bytes of the unpacked tar.

    Raises:
        InputError: the tar is damaged, or larger than the limit.
    """
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer = _layer(tar, blobs, limit)
    rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
    config = {"architecture": host_architecture(), "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _blob(blobs, config, "application/vnd.oci.image.config.v1+json"),
        "layers": [layer],
    }
    index = {"schemaVersion": 2, "manifests": [_blob(blobs, manifest, str(manifest["mediaType"]))]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _layer(tar: Path, blobs: Path, limit: int) -> dict[str, object]:
    draft = blobs / "layer"
    try:
        with tar.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            opener = next((opener for magic, opener in _OPENERS if start.startswith(magic)), None)
            if opener is None:
                digest, size = of_stream(file, limit=limit)
                draft.symlink_to(tar)
            else:
                with draft.open("wb") as copy:
                    digest, size = of_stream(cast(BinaryIO, opener(file)), copy, limit=limit)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(
            f"cannot unpack {tar}: {error}", hint="the archive is damaged: create it again"
        ) from error
    draft.rename(blobs / digest)
    kind = "application/vnd.oci.image.layer.v1.tar"
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _blob(blobs: Path, value: object, kind: str) -> dict[str, object]:
    data = json.dumps(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}
