"""Conditions for reusing an image."""

from enum import StrEnum


class ImageMode(StrEnum):
    """Condition under which an image that was built before is reused.

    REBUILD: never; VERSION: if its name and version are the template's, regardless of other changes; LOCK: if
    all its components are the same: definition, variables, files and bases.
    """

    REBUILD = "rebuild"
    VERSION = "version"
    LOCK = "lock"
