"""Metadata that depends on the place of publication: the project's links, and the README with such links.

A hook of hatchling (pyproject.toml). RELEASE_REPOSITORY names the project's page on GitHub, and is set by
scripts/release.py. Without it a build has no project URLs, and the README's links stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"""(?![a-z]+:|[#/])(?P<target>[^)\s"]+)"""
#: First part of an image with a relative address, in Markdown or HTML, and of a link.
IMAGE = re.compile(r"""(?P<before>!\[[^\]]*\]\(|<img [^>]*?src=")""" + _RELATIVE)
LINK = re.compile(r"(?P<before>\]\()" + _RELATIVE)


class PackageMetadata(MetadataHookInterface):
    """Hook that sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository := os.environ.get("RELEASE_REPOSITORY", "").rstrip("/"):
            readme = absolute(readme, repository, f"v{metadata['version']}")
            metadata["urls"] = urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def urls(repository: str) -> dict[str, str]:
    """Return project URLs, under the labels that PyPI knows."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown with its relative links made absolute: to files of the repository at a tag."""
    for pattern, kind in ((IMAGE, "raw"), (LINK, "blob")):
        text = pattern.sub(rf"\g<before>{repository}/{kind}/{tag}/\g<target>", text)
    return text
