"""References of images: `docker://python:3.12-slim`, `registry.example/team/app@sha256:...`.

The grammar is that of github.com/distribution/reference, with Docker Hub's defaults.
"""

import re
from dataclasses import dataclass

from prorl_envs.errors import InputError

DOCKER_HUB = "docker.io"
_DOCKER_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io")
_HOST = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?"
)
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LENGTH_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class ImageReference:
    """Name of an image in a registry.

    Args:
        registry: host, and port if it is not the default.
        repository: path in the registry.
        tag: version, which may change its image; "" if there is only a digest.
        digest: digest of the manifest or index, `sha256:...`; "" if there is none.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def version(self) -> str:
        """Last part of the manifest's URL: the digest if there is one, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"


def is_digest(text: str) -> bool:
    """Return True for `sha256:` and 64 hexadecimal digits, the only accepted kind of digest."""
    return _DIGEST.fullmatch(text) is not None


def parse_reference(text: str) -> ImageReference:
    """Parse a reference, with or without `docker://`.

    Raises:
        InputError: the text is not a reference.
    """
    if len(text) > _LENGTH_LIMIT:
        raise InputError("an image's reference is too long")
    rest, _, digest = text.removeprefix("docker://").partition("@")
    head, slash, tail = rest.rpartition("/")
    last, colon, tag = tail.partition(":")
    registry, repository = _split(f"{head}{slash}{last}")
    checks = (
        (not _HOST.fullmatch(registry), f"invalid registry: {registry[:100]!r}"),
        (
            not _REPOSITORY.fullmatch(repository),
            f"invalid repository: {repository[:100]!r} (lower case only)",
        ),
        (colon and not _TAG.fullmatch(tag), f"invalid tag: {tag[:100]!r}"),
        ("@" in text and not is_digest(digest), f"invalid digest: {digest[:100]!r} (sha256 only)"),
    )
    for failed, problem in checks:
        if failed:
            raise InputError(
                f"not an image's reference: {text[:200]!r}: {problem}",
                hint="such as docker://python:3.12-slim",
            )
    return ImageReference(registry, repository, tag or ("" if digest else "latest"), digest)


def _split(name: str) -> tuple[str, str]:
    """Split a name into registry and repository. The first part is a registry if it looks like a host."""
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        first, rest = DOCKER_HUB, name
    if first in _DOCKER_HUB_NAMES:
        return DOCKER_HUB, rest if "/" in rest else f"library/{rest}"
    return first, rest
