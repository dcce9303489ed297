"""Parser and renderer of Apptainer definition files.

A definition consists of stages. A stage has a header of `Key: value` lines, starting with `Bootstrap`, and
sections that start with `%name` (https://apptainer.org/docs/user/latest/definition_files.html).
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prorl_envs.errors import InputError

TEXT_LIMIT = 1 << 20
_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_SECTION = re.compile(r"%([A-Za-z]\w*)(.*)")
_LINE_END = re.compile(r"\r\n?|\n")
_HEADER = re.compile(r"\s*([A-Za-z]+)\s*:\s*(.*?)\s*")


@dataclass
class Section:
    """A section: `%name arguments`, and its lines."""

    name: str
    arguments: str
    lines: list[str] = field(default_factory=list)


@dataclass
class BuildStage:
    """A stage: its header by lower-case keys, and its sections in order."""

    header: dict[str, str] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)

    def add(self, name: str, lines: Sequence[str]) -> None:
        """Add lines to the section `name`; create the section if it is missing."""
        section = next((s for s in self.sections if (s.name, s.arguments) == (name, "")), None)
        if section is None:
            section = Section(name, "")
            self.sections.append(section)
        section.lines += lines


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace `{{ name }}` by values.

    Raises:
        InputError: a value is missing, is not used, or would add a line to the definition.
    """
    wanted = set(_VARIABLE.findall(text))
    if missing := sorted(wanted - values.keys()):
        raise InputError(f"the definition needs a value for {', '.join(missing)}", hint="--set NAME=VALUE")
    if unused := sorted(values.keys() - wanted):
        raise InputError(f"the definition does not use {', '.join(unused)}", hint="write {{ name }} in it")
    for name, value in values.items():
        if not value.isprintable():
            raise InputError(f"the value of {name} must be one printable line")
    return _VARIABLE.sub(lambda match: values[match[1]], text)


def parse(text: str) -> list[BuildStage]:
    """Parse a definition into stages.

    Raises:
        InputError: the text is not a definition, or has a section that runs on the host.
    """
    if len(text) > TEXT_LIMIT:
        raise InputError(f"the definition has {len(text)} characters, more than {TEXT_LIMIT}")
    stages: list[BuildStage] = []
    section: Section | None = None
    for line in _LINE_END.split(text.removesuffix("\n")):
        header = _HEADER.fullmatch(line)
        if line.lower().startswith("bootstrap:"):  # anywhere in the file, as in Apptainer
            stages.append(BuildStage())
            section = None
        if match := _SECTION.fullmatch(line):
            section = Section(match[1].lower(), match[2].strip())
            if not stages:
                raise InputError("the definition does not start with a Bootstrap line")
            stages[-1].sections.append(section)
        elif section is not None:
            section.lines.append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            if not header or not stages:
                raise InputError(f"not a line of a definition's header: {line[:100]!r}")
            stages[-1].header[header[1].lower()] = header[2]
    if not stages:
        raise InputError("the definition is empty", hint="it must start with Bootstrap: and From:")
    names = {section.name for stage in stages for section in stage.sections}
    if "setup" in names:
        raise InputError("%setup is refused: it runs on the host with your permissions", hint="use %post")
    if "appfiles" in names:
        raise InputError("%appfiles is not supported", hint="use %files")
    return stages


def render(stages: Sequence[BuildStage]) -> str:
    """Render the text of a definition."""
    lines: list[str] = []
    for stage in stages:
        lines += [f"{key.capitalize()}: {value}" for key, value in stage.header.items()]
        for section in stage.sections:
            lines += ["", f"%{section.name} {section.arguments}".rstrip(), *section.lines]
        lines.append("")
    return "\n".join(lines)


def copied_files(section: Section) -> list[tuple[str, str]]:
    """Return the copies of a `%files` section: pairs of source and absolute destination.

    Raises:
        InputError: a line is not such a pair.
    """
    pairs = []
    for line in section.lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"%files: {error}: {line[:100]!r}") from error
        if not words:
            continue
        if len(words) > 2:
            raise InputError(f"%files: a source and a destination are expected: {line[:100]!r}")
        pairs.append((words[0], words[-1]))
    return pairs
