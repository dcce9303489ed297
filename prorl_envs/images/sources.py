"""Sources of images, and the detection of their kind."""

import re
import tarfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prorl_envs.errors import InputError, expand_user
from prorl_envs.sandbox.filesystem.sif import is_sif

REMOTE_SCHEMES = ("docker", "oras", "library")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PREFIX = re.compile(r"([a-z-]+):(.*)", re.DOTALL)
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}")
#: Names in a container archive; a root file system starts with none of these.
_ARCHIVE_NAMES = re.compile(
    r"(\./)?(blobs/.*|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}.*)", re.DOTALL
)
_MEMBERS_LIMIT = 10_000
_KNOWN = (
    "known: a directory, a SIF, a tar of a root file system, an OCI or Docker archive, an OCI layout, "
    "docker://, oras:// and library://"
)


class SourceKind(StrEnum):
    """Kind of a source; the values are the prefixes that select it on a command line."""

    HOST = "host"
    DIRECTORY = "dir"
    SIF = "sif"
    TAR = "tar"
    OCI_LAYOUT = "oci"
    OCI_ARCHIVE = "oci-archive"
    DOCKER_ARCHIVE = "docker-archive"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Source:
    """Source of an image.

    Args:
        location: an absolute path, or for REMOTE an address such as `docker://busybox:1.36`.
    """

    kind: SourceKind
    location: str = ""

    @property
    def path(self) -> Path:
        """The local path; meaningless with HOST and REMOTE."""
        return Path(self.location)

    @property
    def name(self) -> str:
        """A short name for people and files."""
        last = self.location.rstrip("/").rpartition("/")[2].partition("@")[0]
        last = last.replace(":", "-") if self.kind is SourceKind.REMOTE else last.partition(".")[0]
        return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")[:48] or "image"


def parse_source(text: str | Path | None) -> Source:
    """Parse a source: an address, a path, or `KIND:PATH` to state the kind explicitly.

    Raises:
        InputError: the source does not exist, or is not an image.
    """
    if text is None or str(text) == "host":
        return Source(SourceKind.HOST)
    if not str(text) or "\0" in str(text):
        raise InputError("the source of an image is empty, or not a path", hint=_KNOWN)
    if isinstance(text, str):
        if scheme := _SCHEME.match(text):
            return _remote(text, scheme[1])
        prefix = _PREFIX.fullmatch(text)
        if prefix and prefix[1] in set(SourceKind) - {SourceKind.HOST, SourceKind.REMOTE}:
            path = expand_user(prefix[2]).absolute()
            if not path.exists():
                raise InputError(f"no such image: {path}")
            return Source(SourceKind(prefix[1]), str(path))
    path = expand_user(text).absolute()
    return Source(_kind_of(path), str(path))


def _remote(address: str, scheme: str) -> Source:
    if scheme not in REMOTE_SCHEMES:
        raise InputError(f"unknown source of images: {scheme}://", hint=_KNOWN)
    if not _REFERENCE.fullmatch(address.removeprefix(f"{scheme}://")):
        raise InputError(
            f"not an image's address: {address[:200]!r}", hint="such as docker://python:3.12-slim"
        )
    return Source(SourceKind.REMOTE, address)


def _kind_of(path: Path) -> SourceKind:
    try:
        if path.is_dir():
            layout = (path / "oci-layout").is_file() and (path / "index.json").is_file()
            return SourceKind.OCI_LAYOUT if layout else SourceKind.DIRECTORY
        if not path.is_file():
            raise InputError(f"no such image: {path}", hint=_KNOWN)
        return SourceKind.SIF if is_sif(path) else _kind_of_archive(path)
    except OSError as error:
        raise InputError(f"cannot read the image {path}: {error.strerror}") from error


def _kind_of_archive(path: Path) -> SourceKind:
    """Detect the kind by the first file of the archive, or by further files if it may be of a container."""
    try:
        with tarfile.open(path) as archive:
            for count, member in enumerate(archive):
                name = member.name.removeprefix("./")
                if name == "oci-layout":
                    return SourceKind.OCI_ARCHIVE
                if name == "manifest.json":
                    return SourceKind.DOCKER_ARCHIVE  # since version 25 of Docker also OCI: both work
                if not member.isdir() and not _ARCHIVE_NAMES.fullmatch(member.name):
                    return SourceKind.TAR
                if count >= _MEMBERS_LIMIT:
                    break
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise InputError(f"not an image: {path} ({str(error)[:200]})", hint=_KNOWN) from error
    raise InputError(f"{path} is a tar of neither a root file system nor a container", hint=_KNOWN)
