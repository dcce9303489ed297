"""Extraction of a source archive. Runs no code of the archive."""

import re
import tarfile
from pathlib import Path

from prorl_envs.errors import EnvironmentFault

MAX_FILES = 50_000
MAX_BYTES = 512 * 2**20


def unpack_sdist(folder: Path, pin: str, tree: Path) -> None:
    """Unpack the source release in `folder` into `tree`.

    Args:
        folder: folder with one archive.
        pin: the requested release, `name==version`.
        tree: directory that is created with the content of the archive's top directory.

    Raises:
        EnvironmentFault: the archive is another release, is too large, or contains an entry that is not
            allowed.
    """
    name, _, version = pin.partition("==")
    archives = sorted(folder.glob("*.tar.gz"))
    if len(archives) != 1:
        raise EnvironmentFault(f"{pin} has no source release as .tar.gz")
    staging = tree.with_name(f"{tree.name}.unpacking")
    try:
        with tarfile.open(archives[0]) as archive:
            _check_size(archive, pin)
            archive.extractall(staging, filter="data")
    except tarfile.TarError as error:
        raise EnvironmentFault(f"the source release of {pin} cannot be unpacked: {error}") from error
    tops = list(staging.iterdir())
    if len(tops) != 1 or not tops[0].is_dir() or tops[0].is_symlink():
        raise EnvironmentFault(f"the source release of {pin} does not consist of one directory")
    found = _metadata(tops[0] / "PKG-INFO")
    if (_normal(found.get("Name", "")), found.get("Version")) != (_normal(name), version):
        raise EnvironmentFault(f"requested {pin}, got {found.get('Name')}=={found.get('Version')}")
    tops[0].rename(tree)
    staging.rmdir()


def _check_size(archive: tarfile.TarFile, pin: str) -> None:
    total = 0
    for number, member in enumerate(archive, start=1):
        total += member.size
        if number > MAX_FILES or total > MAX_BYTES:
            raise EnvironmentFault(
                f"the source release of {pin} is larger than {MAX_FILES} files or {MAX_BYTES} bytes"
            )


def _metadata(path: Path) -> dict[str, str]:
    """Return the header of a PKG-INFO file."""
    if path.is_symlink() or not path.is_file():
        return {}
    header = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    fields = (line.partition(":") for line in header.splitlines() if not line.startswith((" ", "\t")))
    return {name: value.strip() for name, _, value in fields}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
