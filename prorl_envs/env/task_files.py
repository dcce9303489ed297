"""Files in task rows: text, or bytes with an execute permission."""

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from prorl_envs.env.columns import WITHOUT_NULLS, RowModel


def _inside(path: str) -> str:
    """Validate a relative path that does not lead out of its directory."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a relative path without '..'")
    return path


def encodable(text: str) -> str:
    """Validate text that a file or a command line can hold."""
    if "\0" in text or re.search("[\ud800-\udfff]", text):
        raise ValueError("holds a NUL or a lone surrogate")
    return text


RelativePath = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_inside)]
Text = Annotated[str, Field(max_length=1_000_000), AfterValidator(encodable)]


class TaskFile(RowModel):
    """File that is binary or executable.

    Args:
        text: content as text; None if `base64` is given.
        base64: content as base64; None if `text` is given.
        executable: True sets the execute permission.
    """

    text: Text | None = None
    base64: str | None = Field(default=None, max_length=8_000_000)
    executable: bool = False

    @model_validator(mode="after")
    def _one_content(self) -> "TaskFile":
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        try:
            self.content()
        except binascii.Error as error:
            raise ValueError(f"base64: {error}") from error
        return self

    def content(self) -> bytes:
        if self.base64 is not None:
            return base64.b64decode(self.base64, validate=True)
        return (self.text or "").encode()


Files = Annotated[dict[RelativePath, Text | TaskFile], WITHOUT_NULLS]


def content_of(file: str | TaskFile) -> tuple[bytes, bool]:
    """Return the bytes of a file, and whether it is executable."""
    return (file.encode(), False) if isinstance(file, str) else (file.content(), file.executable)


def contents(files: Mapping[str, str | TaskFile]) -> list[tuple[str, bytes, bool]]:
    """Return path, bytes and executability of each file."""
    return [(path, *content_of(file)) for path, file in files.items()]
