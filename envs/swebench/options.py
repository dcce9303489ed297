"""Options of this family: `environments.NAME.options` in the settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Folder = Annotated[Path, AfterValidator(Path.expanduser)]


class ImageOptions(BaseModel):
    """Locations of the images of instances.

    Args:
        folder: folder of SIF files (or directories with a root file system), searched by `patterns`.
        patterns: file names in `folder`, with `*` and with `{id}` (of the instance), `{name}` (of the image
            in Docker, without registry and tag) and `{repo}`. The first pattern that matches a file is used;
            letter case is ignored.
        lookup: JSON file that maps the id of an instance to a path or an address.
        registry: registry that replaces Docker's for the images that rows name, such as
            `mirror.example.org:5000`.
        definition: definition file to build images from, with `{{ instance_id }}`,
            `{{ repo }}`, `{{ base_commit }}` and `{{ image }}`.
        pull: whether a missing image is pulled from the registry; if false, the episode fails with an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Folder | None = None
    patterns: tuple[str, ...] = Field(
        default=("{id}.sif", "{name}.sif", "{name}_latest.sif", "*{name}*.sif", "*{id}*.sif"), min_length=1
    )
    lookup: Folder | None = None
    registry: str = Field(default="", pattern=r"^[A-Za-z0-9._:/-]*$")
    definition: Folder | None = None
    pull: bool = False


class SwebenchOptions(BaseModel):
    """All options of the family.

    Args:
        prefer: preferred method if an instance has both: rebuild it from its `release`, or use its `image`.
        reward: `resolved` is 1 or 0. `partial` is the share of FAIL_TO_PASS that passes, and 0 if a test of
            PASS_TO_PASS fails.
        verdict: `strict` fails every test that the log reports as failed, also if only a sub-test or the
            teardown failed; `official` is the verdict of the `swebench` package, which overlooks such
            failures.
        test_timeout_s: timeout of an instance's tests, in seconds.
        images: locations of images.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefer: Literal["release", "image"] = "release"
    reward: Literal["resolved", "partial"] = "resolved"
    verdict: Literal["strict", "official"] = "strict"
    test_timeout_s: float = Field(default=1800.0, gt=0)
    images: ImageOptions = ImageOptions()
