"""Parsing a SIF's header: any bytes yield a partition inside the file, or a typed error."""

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.sif import Partition, system_partition

WHOLE = 8192
QWORD = st.integers(-(2**63), 2**63 - 1)


def sif(
    *, kind: int = 0x4004, offset: int = 4096, size: int = 4096, file_system: int = 1, part: int = 2,
    total: int = 1, table: int = 128,
) -> bytes:  # fmt: skip
    """Create a file of WHOLE bytes with one descriptor."""
    header = struct.pack("<32s10s22x", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0")
    header += struct.pack("<8q", 0, 0, 0, total, table, 585, 0, 0)
    descriptor = struct.pack("<i?12xqq40x128xii376x", kind, True, offset, size, file_system, part)
    return (header + descriptor).ljust(WHOLE, b"\0")


def parse(content: bytes) -> Partition:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return system_partition(Path(file.name))


def test_the_primary_partition_is_found() -> None:
    assert parse(sif()) == Partition(4096, 4096)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not an image"),
        (b"x" * WHOLE, "not an image"),
        (sif(kind=0x4001), "no root file system"),
        (sif(part=3), "no root file system"),
        (sif(total=0), "no root file system"),
        (sif(file_system=2), "not a squashfs"),
        (sif(file_system=4), "encrypted"),
        (sif(size=4097), "cut short"),
        (sif(offset=-1), "cut short"),
        (sif()[:500], "no root file system"),
    ],
)
def test_an_unmountable_file_is_refused_with_a_reason(content: bytes, word: str) -> None:
    with pytest.raises(SandboxError, match=word):
        parse(content)


@given(QWORD, QWORD, QWORD, QWORD)
def test_a_hostile_header_cannot_point_outside(offset: int, size: int, total: int, table: int) -> None:
    try:
        found = parse(sif(offset=offset, size=size, total=total, table=table))
    except SandboxError:
        return
    assert 0 <= found.offset < found.offset + found.size <= WHOLE
