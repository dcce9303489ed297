"""Conversion of NeMo Gym's image names to our image sources. Imports nothing of NeMo Gym."""

import logging
import re
from collections.abc import Mapping

from prorl_envs.config import Settings
from prorl_envs.env.node import default_cache_dir
from prorl_envs.errors import InputError, expand_user
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.sources import Source, parse_source
from prorl_envs.images.store import ImageStore
from prorl_envs.images.supervised import BuildLimits
from prorl_envs.images.template import ImageTemplate

logger = logging.getLogger(__name__)

#: A path, as opposed to a name in a registry; `KIND:PATH` is also a path.
_PATH = re.compile(r"([a-z-]+:)?[/.~].*", re.DOTALL)
_FILE = re.compile(r".*\.(sif|def|tar|tar\.gz|tgz|tar\.bz2|tar\.xz)", re.DOTALL)


def image_source(name: str | None, variables: Mapping[str, str]) -> Source | ImageTemplate:
    """Return the source of an image. Accesses the named file.

    A name that is neither an address nor a path is a Docker name, as for NeMo Gym's own providers.

    Args:
        name: image name in a `SandboxSpec`; None, "" and `host` are the host's own system.
        variables: values for a definition.

    Raises:
        InputError: there is no such file, or it is not an image.
    """
    if not name or name == "host":
        return parse_source(None)
    text = name.removeprefix("file://")
    path = expand_user(text)
    if path.suffix == ".def" or (_PATH.fullmatch(text) and path.name.lower().startswith("dockerfile")):
        return ImageTemplate.read(path, variables=variables)
    if variables:
        raise InputError(f"image_variables are for definitions, and {name!r} is not a definition")
    if "://" in text:
        return parse_source(text)
    return parse_source(text if _PATH.fullmatch(text) or _FILE.fullmatch(text) else f"docker://{text}")


def image_builder(settings: Settings) -> ImageBuilder:
    """Return the builder that builds and pulls images, into the same cache as `prorl-envs image`.

    Raises:
        SandboxError: the builder cannot be created.
    """
    store = ImageStore(settings.image_cache or (settings.cache_dir or default_cache_dir()) / "images")
    limits = BuildLimits(seconds=settings.image_build_s, unpacked_bytes=settings.image_build_bytes)
    return ImageBuilder(
        store, scratch=settings.run_dir, limits=limits, progress=lambda line: logger.debug("image: %s", line)
    )
