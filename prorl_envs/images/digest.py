"""Content digests: values, files or trees with the same digest are equal."""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from prorl_envs.errors import InputError

_CHUNK = 1 << 20


def of_value(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a mapping of plain values, independent of the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def of_stream(stream: BinaryIO, copy: BinaryIO | None = None, *, limit: int | None = None) -> tuple[str, int]:
    """Return SHA-256 and size of the rest of a stream; copy it to `copy` at the same time.

    Args:
        limit: most bytes of the rest.

    Raises:
        InputError: the rest is longer than `limit`.
    """
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        size += len(chunk)
        if limit is not None and size > limit:
            raise InputError(f"the image has more than {limit} bytes", hint="raise image_build_bytes")
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
    return digest.hexdigest(), size


def place_of(path: Path) -> str:
    """Return path and time of modification of a file or directory; the path alone if it is missing."""
    try:
        return f"{path} {path.stat().st_mtime_ns}"
    except OSError:
        return str(path)


def of_path(path: Path) -> str:
    """Return the SHA-256 of a file, or of a tree with its names, kinds, permissions, links and contents.

    Raises:
        InputError: a file cannot be read.
    """
    try:
        if not path.is_dir():
            with path.open("rb") as file:
                return of_stream(file)[0]
        digest = hashlib.sha256()
        for line in _lines(os.fsencode(path.resolve()), b""):
            digest.update(len(line).to_bytes(8, "big") + line)
        return digest.hexdigest()
    except OSError as error:
        hint = "give a directory that you may read completely" if path.is_dir() else ""
        raise InputError(f"cannot read {error.filename or path}: {error.strerror}", hint=hint) from error


def _lines(root: bytes, below: bytes) -> "list[bytes]":
    lines: list[bytes] = []
    pending = [below]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(root, folder)) as entries:  # noqa: PTH118
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = folder + b"/" + entry.name if folder else entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            content = b""
            if stat.S_ISREG(mode):
                with open(entry.path, "rb") as file:  # noqa: PTH123
                    content = of_stream(file)[0].encode()
            elif stat.S_ISLNK(mode):
                content = os.fsencode(os.readlink(entry.path))  # noqa: PTH115
            elif stat.S_ISDIR(mode):
                pending.append(name)
            lines.append(b"\0".join([name, oct(mode).encode(), content]))
    return lines
