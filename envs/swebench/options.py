"""Options of this family: `environments.NAME.options` in the settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Folder = Annotated[Path, AfterValidator(Path.expanduser)]


class ImageOptions(BaseModel):
    """Locations of the images of instances.

    Args:
        folder: folder of SIF files (or directories with a root file system), searched by `patterns`.
        patterns: names in it, with `*`, and in braces `id` (of the instance), `name` (the image's in Docker,
            without registry and tag) and `repo`. The first that exists is used; letter case is ignored.
        lookup: JSON file, a map from an instance's id to a path or an address.
        registry: replaces Docker's for the images that rows name: `mirror.example.org:5000`.
        definition: a definition or Dockerfile to build images from, with `{{ instance_id }}`, `{{ repo }}`,
            `{{ base_commit }}` and `{{ image }}`.
        pull: an episode pulls or builds a missing image; if false, it fails with an error.
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
    """All of the family's options.

    Args:
        prefer: the preferred method if both are known: rebuild an instance from its `release`, or use its
            `image`.
        reward: `resolved` is 1 or 0. `partial` is the share of FAIL_TO_PASS that passes, and 0 if a test of
            PASS_TO_PASS is broken.
        verdict: `strict` fails every test that the log reports as failed, also if only a sub-test or the
            teardown failed; `official` is the verdict of the `swebench` package, which overlooks those.
        test_timeout_s: timeout of an instance's tests, in seconds.
        images: locations of images.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefer: Literal["release", "image"] = "release"
    reward: Literal["resolved", "partial"] = "resolved"
    verdict: Literal["strict", "official"] = "strict"
    test_timeout_s: float = Field(default=1800.0, gt=0)
    images: ImageOptions = ImageOptions()
