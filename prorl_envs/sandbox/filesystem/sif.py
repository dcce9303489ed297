"""Parser of Singularity image files (SIF): finds the root file system and the labels.

This parser replaces `apptainer sif list`, so that a SIF works without an installed Apptainer. The layout is
that of the `sif` package of Sylabs and Apptainer, version 1 of the format: little-endian, unpadded.
"""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prorl_envs.errors import SandboxError

#: Launch line, magic, version, architecture, identity; then the number of descriptors and their offset.
_HEADER = struct.Struct("<32s10s3s3s16s16x8xqqq16x")
#: Data type, used, id, group, link, offset, size; then times, owner and name; then file system and part type.
_DESCRIPTOR = struct.Struct("<i?4x4x4xqq8x16x16x128sii376x")
_MAGIC = b"SIF_MAGIC\0"
_PARTITION, _JSON = 0x4004, 0x4006
_SQUASHFS, _ENCRYPTED = 1, 4
_PRIMARY_SYSTEM = 2
_DESCRIPTOR_LIMIT = 1024
_JSON_LIMIT = 1 << 20

_CONVERT = "unpack it with `apptainer build --sandbox DIRECTORY IMAGE` and give the directory as the image"


@dataclass(frozen=True, slots=True)
class Partition:
    """A squashfs file system inside a file; offset and size in bytes."""

    offset: int
    size: int


def is_sif(path: Path) -> bool:
    """Return True if the file starts with a SIF header. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return file.read(_HEADER.size)[32:42] == _MAGIC


def system_partition(path: Path) -> Partition:
    """Return the primary system partition of the SIF at `path`.

    Raises:
        SandboxError: the file is no SIF or is cut short, or its system is not a plain squashfs.
    """
    try:
        with path.open("rb") as file:
            table = _descriptors(path, file)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SandboxError(f"cannot read the image {path}: {error}") from error
    return _primary_system(path, table, size)


def labels(path: Path) -> dict[str, str]:
    """Return the labels that the SIF at `path` was built with; empty if it has none.

    `apptainer inspect` is not used: if a SIF does not store labels separately, it runs the image's own shell.

    Raises:
        SandboxError: the file is no SIF.
    """
    try:
        with path.open("rb") as file:
            for kind, used, offset, size, *_ in _DESCRIPTOR.iter_unpack(_descriptors(path, file)):
                if used and kind == _JSON and 0 < size <= _JSON_LIMIT and offset > 0:
                    file.seek(offset)
                    found = _labels_in(file.read(size))
                    if found:
                        return found
    except OSError as error:
        raise SandboxError(f"cannot read the image {path}: {error}") from error
    return {}


def _labels_in(text: bytes) -> dict[str, str]:
    try:
        found = json.loads(text)["data"]["attributes"]["labels"]
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _descriptors(path: Path, file: BinaryIO) -> bytes:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[32:42] != _MAGIC:
        raise SandboxError(
            f"not an image: {path}", hint="an image is a SIF or a directory with a root file system"
        )
    *_, total, offset, _ = _HEADER.unpack(header)
    file.seek(max(offset, 0))
    table = file.read(min(max(total, 0), _DESCRIPTOR_LIMIT) * _DESCRIPTOR.size)
    return table[: len(table) - len(table) % _DESCRIPTOR.size]


def _primary_system(path: Path, table: bytes, file_size: int) -> Partition:
    for kind, used, offset, size, _, file_system, part in _DESCRIPTOR.iter_unpack(table):
        if not used or kind != _PARTITION or part != _PRIMARY_SYSTEM:
            continue
        if file_system != _SQUASHFS:
            form = "encrypted" if file_system == _ENCRYPTED else "not a squashfs"
            raise SandboxError(f"the system in {path} is {form}", hint=_CONVERT)
        if offset < 0 or size <= 0 or offset + size > file_size:
            raise SandboxError(f"the image {path} is cut short", hint="copy or build it again")
        return Partition(offset, size)
    raise SandboxError(f"the image {path} has no root file system", hint=_CONVERT)
