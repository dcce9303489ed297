"""Hatchling hook for metadata with links to the project's repository: the project URLs and the README.

pyproject.toml names this hook. scripts/release.py sets RELEASE_REPOSITORY to the project's page on GitHub.
Without this variable a build has no project URLs, and the README's links stay relative.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE = r"""(?![a-z]+:|[#/])(?P<target>[^)\s"]+)"""
#: Start of a Markdown or HTML image with a relative address, and of a Markdown link with a relative address.
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
    """Return the project URLs by labels that PyPI recognizes."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def absolute(text: str, repository: str, tag: str) -> str:
    """Replace relative links in Markdown by absolute links to the repository's files at a tag."""
    for pattern, kind in ((IMAGE, "raw"), (LINK, "blob")):
        text = pattern.sub(rf"\g<before>{repository}/{kind}/{tag}/\g<target>", text)
    return text
