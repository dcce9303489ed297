"""When an image is built again."""

from enum import StrEnum


class Mode(StrEnum):
    """When an image that was built before is taken again.

    REBUILD never; VERSION where its name and version are the template's, whatever else changed; LOCK where
    all that it was made of is the same: definition, variables, files and bases.
    """

    REBUILD = "rebuild"
    VERSION = "version"
    LOCK = "lock"
