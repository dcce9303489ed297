"""Image templates: definitions with variables, a version and files, from which images are built."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from prorl_envs.errors import InputError
from prorl_envs.images.definition import TEXT_LIMIT, BuildStage, copied_files, parse, substitute

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")
#: Characters without a special meaning in Apptainer's lists of files.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTemplate:
    """Definition to build an image from.

    Args:
        name: short, in lower case. `ImageMode.VERSION` reuses an image by name and version.
        version: any short text; change it to rebuild the image.
        definition: text in Apptainer's format, with `{{ name }}` for variables. No `%setup`.
        variables: value of each variable, one line.
        files: further files or trees to copy, by absolute path inside: the path on the host.
        folder: base of relative paths. They, and links in them, cannot lead out of it.
    """

    name: str
    version: str
    definition: str
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    folder: Path = Path()

    def __post_init__(self) -> None:
        for field_name, text in (("name", self.name), ("version", self.version)):
            if not _NAME.fullmatch(text):
                raise InputError(
                    f"not a {field_name} of an image: {text[:100]!r}", hint="a-z 0-9 . _ -, 48 at most"
                )

    @classmethod
    def read(
        cls, path: Path, *, name: str = "", version: str = "1", variables: Mapping[str, str] | None = None
    ) -> Self:
        """Read a template from a definition file. Its folder is the base of relative paths.

        Args:
            name: name of the template; by default that of the file.

        Raises:
            InputError: the file cannot be read, or is a Dockerfile.
        """
        if path.name.lower().startswith("dockerfile"):
            raise InputError(
                f"{path} is a Dockerfile, not a definition",
                hint=f"build it into layers: prorl-envs image build {path.parent} --file {path}",
            )
        try:
            with path.open(encoding="utf-8-sig") as file:
                text = file.read(TEXT_LIMIT + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the definition {path}: {error}") from error
        name = name or re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._") or "image"
        folder = path.absolute().parent
        return cls(name=name, version=version, definition=text, variables=variables or {}, folder=folder)

    def stages(self) -> list[BuildStage]:
        """Return the definition's stages, with variables substituted.

        Raises:
            InputError: a variable is missing or unused, or a line is invalid.
        """
        return parse(substitute(self.definition, self.variables))

    def copied(self, stages: list[BuildStage]) -> dict[str, Path]:
        """Return the files to copy, by destination. Remove the `%files` sections of the host's files.

        Raises:
            InputError: a path leads out of the template's folder, or has special characters.
        """
        found: dict[str, Path] = {}
        for stage in stages:
            for section in [s for s in stage.sections if s.name == "files" and not s.arguments]:
                if stage is not stages[-1]:
                    raise InputError("%files of an earlier stage is not supported", hint="use the last")
                stage.sections.remove(section)
                for source, target in copied_files(section):
                    if target.endswith("/"):
                        target += PurePosixPath(source).name
                    found[target] = Path(source)
        found |= self.files
        return {_inside(target): self._on_host(source) for target, source in found.items()}

    def _on_host(self, source: Path) -> Path:
        path = self.folder / source
        resolved = path.resolve()
        if not source.is_absolute() and not resolved.is_relative_to(self.folder.resolve()):
            raise InputError(f"{source} leads out of the template's folder", hint="use an absolute path")
        if not (resolved.is_file() or resolved.is_dir()):
            raise InputError(f"no such file to copy into the image: {path}")
        return resolved


def _inside(target: str) -> str:
    path = PurePosixPath(target)
    if not path.is_absolute() or ".." in path.parts or not _PLAIN.fullmatch(target) or len(path.parts) < 2:
        raise InputError(
            f"not a destination for a file in an image: {target[:100]!r}", hint="an absolute, plain path"
        )
    return str(path)
