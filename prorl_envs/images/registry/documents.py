"""Documents of an image: index, manifest, configuration (github.com/opencontainers/image-spec, and Docker's
schema 2). They come from a registry, so every field is checked."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.images.registry.reference import is_digest
from prorl_envs.sandbox.filesystem.layered import LAYER_LIMIT, ImageConfig

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_PLATFORM = re.compile(r"linux/[a-z0-9]{1,16}(/v[0-9]{1,2})?")
_INDEX_LIMIT = 1000


class ImageRefused(SandboxError):
    """Error for an image with damaged or unknown documents, or without a variant for the platform."""

    retryable = False


@dataclass(frozen=True, slots=True)
class BlobDescriptor:
    """Reference of a document or layer.

    Args:
        digest: `sha256:...`.
        size: size in bytes.
    """

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """Parts of one image, the lowest layer first."""

    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...]


def host_platform() -> str:
    """Return the platform of this machine, such as `linux/amd64`."""
    return f"linux/{host_architecture()}"


def host_architecture() -> str:
    """Return the name that images give this machine's architecture, such as `amd64`."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def check_platform(text: str) -> str:
    """Return a platform unchanged.

    Raises:
        ImageRefused: the text is not `linux/ARCHITECTURE` or `linux/ARCHITECTURE/VARIANT`.
    """
    if not _PLATFORM.fullmatch(text):
        raise ImageRefused(f"not a platform: {text[:100]!r}", hint="such as linux/amd64")
    return text


def parse_manifest(data: bytes, wanted: str) -> ImageManifest | BlobDescriptor:
    """Parse a manifest or an index.

    Args:
        wanted: the platform.

    Returns:
        The manifest; for an index, the descriptor of the manifest for the platform.

    Raises:
        ImageRefused: the document is neither, or has no image for the platform.
    """
    document = _mapping(_json(data), "manifest")
    if "manifests" in document:
        return _choose(document, wanted)
    if document.get("schemaVersion") == 1:
        raise ImageRefused(
            "the image has Docker's schema 1, of 2017", hint="push it again with a newer client"
        )
    layers = document.get("layers")
    if "config" not in document or not isinstance(layers, list):
        raise ImageRefused("the registry's answer is not a manifest of an image")
    if not 1 <= len(layers) <= LAYER_LIMIT:
        raise ImageRefused(f"the image has {len(layers)} layers, not 1 to {LAYER_LIMIT}")
    return ImageManifest(_descriptor(document["config"]), tuple(_descriptor(layer) for layer in layers))


def _choose(index: Mapping[str, Any], wanted: str) -> BlobDescriptor:
    entries = index["manifests"]
    if not isinstance(entries, list) or len(entries) > _INDEX_LIMIT:
        raise ImageRefused("the image's index is not a list, or too long")
    names = [_platform_of(entry) for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        if name == wanted or name.startswith(f"{wanted}/"):
            return _descriptor(entry)
    known = ", ".join(sorted({name for name in names if name}))[:200] or "none"
    raise ImageRefused(f"the image has no variant for {wanted}", hint=f"it has: {known}")


def _platform_of(entry: object) -> str:
    """Return the platform of an entry of an index; "" if it has none."""
    found = entry.get("platform") if isinstance(entry, dict) else None
    if not isinstance(found, dict):
        return ""
    parts = [found.get(name) for name in ("os", "architecture", "variant")]
    return "/".join(part for part in parts if isinstance(part, str) and part)


def _descriptor(value: object) -> BlobDescriptor:
    entry = _mapping(value, "descriptor")
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise ImageRefused(f"the image has a digest of an unknown kind: {str(digest)[:100]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ImageRefused(f"the image has a part of unknown size: {str(size)[:100]!r}")
    return BlobDescriptor(digest, size)


def parse_config(data: bytes, layers: int) -> tuple[ImageConfig, tuple[str, ...]]:
    """Parse an image's configuration.

    Args:
        layers: number of the manifest's layers.

    Returns:
        The settings, and the digest of each layer's tar.

    Raises:
        ImageRefused: the document is damaged.
    """
    document = _mapping(_json(data), "configuration")
    rootfs = _mapping(document.get("rootfs"), "configuration")
    digests = _texts(rootfs.get("diff_ids"), "diff_ids")
    if len(digests) != layers or not all(is_digest(digest) for digest in digests):
        raise ImageRefused("the image's configuration does not name each of its layers")
    return _settings(_mapping(document.get("config") or {}, "configuration")), digests


def _settings(found: Mapping[str, Any]) -> ImageConfig:
    env = dict(line.split("=", 1) for line in _texts(found.get("Env"), "Env") if "=" in line)
    health, workdir = found.get("Healthcheck"), found.get("WorkingDir") or ""
    if not isinstance(workdir, str):
        raise ImageRefused("the image has a damaged part: WorkingDir")
    return ImageConfig(
        env=env,
        workdir=workdir,
        entrypoint=_texts(found.get("Entrypoint"), "Entrypoint"),
        command=_texts(found.get("Cmd"), "Cmd"),
        shell=_texts(found.get("Shell"), "Shell") or ImageConfig().shell,
        healthcheck=None if health is None else _mapping(health, "Healthcheck"),
    )


def _json(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImageRefused(
            "the registry's answer is not JSON", hint="check the registry's address"
        ) from error


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ImageRefused(f"the image has a damaged part: {name}")
    return value


def _texts(value: object, name: str) -> tuple[str, ...]:
    found: Sequence[object] = value if isinstance(value, list) else ()
    if not (value is None or isinstance(value, list)) or not all(isinstance(text, str) for text in found):
        raise ImageRefused(f"the image has a damaged part: {name}")
    return tuple(str(text) for text in found)
