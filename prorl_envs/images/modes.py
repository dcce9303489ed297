"""Conditions under which a built image is reused."""

from enum import StrEnum


class ImageMode(StrEnum):
    """Condition under which a built image is reused.

    REBUILD never reuses an image. VERSION reuses it if it has the template's name and version, whatever else
    has changed. LOCK reuses it if all components are equal: definition, variables, files and base images.
    """

    REBUILD = "rebuild"
    VERSION = "version"
    LOCK = "lock"
