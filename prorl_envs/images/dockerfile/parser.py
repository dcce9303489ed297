"""Parses the text of a Dockerfile into instructions (Dockerfile reference, docs.docker.com)."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import InputError, name_hint
from prorl_envs.images.dockerfile.expand import split_words

#: Most bytes of a Dockerfile.
FILE_LIMIT = 4 << 20
_INSTRUCTION_LIMIT = 5000
_HEREDOC_LIMIT = 100
#: Parser directives. `check`, which configures a linter, and `syntax`, which names a parser, are ignored.
_DIRECTIVES = ("syntax", "escape", "check")
INSTRUCTIONS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
)
FLAGS = {
    "FROM": {"platform"},
    "RUN": {"mount", "network", "security"},
    "COPY": {"from", "chown", "chmod", "link", "parents", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}
_HEREDOCS = ("ADD", "COPY", "RUN")
_JSON = {"ADD", "CMD", "COPY", "ENTRYPOINT", "RUN", "SHELL"}
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_HEREDOC = re.compile(r"\d*<<(-?)\s*(['\"]?)([A-Za-z_][A-Za-z0-9_.-]*)\2")
_HEREDOC_START = re.compile(r"\d*<<-?")


class DockerfileError(InputError):
    """Error for a Dockerfile, or for an invalid or unsupported instruction.

    Args:
        message: description of the problem, one sentence.
        file: name of the file for messages.
        line: line of the instruction, from 1; 0 means the whole file.
        instruction: name of the instruction; "" means the whole file.
        hint: remedy for the reader, or empty.
    """

    def __init__(
        self, message: str, *, file: str, line: int = 0, instruction: str = "", hint: str = ""
    ) -> None:
        place = f"{file}:{line}" if line else file
        super().__init__(f"{place}: {instruction}{': ' if instruction else ''}{message}", hint=hint)
        self.file, self.line, self.instruction = file, line, instruction


@dataclass(frozen=True, slots=True)
class Heredoc:
    """Document in a Dockerfile (`<<NAME`).

    Args:
        name: its delimiter.
        content: its lines. Tabs at their start are removed if a `-` precedes the delimiter.
        expands: whether its variables are replaced (if the delimiter has no quotes).
        raw: its lines as written, with the final delimiter.
    """

    name: str
    content: str
    expands: bool
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Instruction of a Dockerfile.

    Args:
        line: first line, from 1.
        name: name in capitals.
        flags: names without `--`, and values ("" if there is none), in order.
        text: arguments after the flags, with their lines joined.
        items: the arguments if they are a JSON list of strings; else None.
        heredocs: documents, in the order in which `text` mentions them.
    """

    line: int
    name: str
    flags: tuple[tuple[str, str], ...] = ()
    text: str = ""
    items: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()

    def flag(self, name: str, default: str = "") -> str:
        """Return the last value of a flag."""
        return dict(self.flags).get(name, default)

    def switch(self, name: str) -> bool:
        """Return the value of a boolean flag."""
        return self.flag(name, "false").lower() in ("", "true", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """Parsed Dockerfile.

    Args:
        file: its name for messages.
        instructions: its instructions in order.
        escape: its escape character.
    """

    file: str
    instructions: tuple[Instruction, ...]
    escape: str = "\\"

    def error(self, instruction: Instruction, message: str, hint: str = "") -> DockerfileError:
        """Return an error at an instruction."""
        return DockerfileError(
            message, file=self.file, line=instruction.line, instruction=instruction.name, hint=hint
        )


def read_dockerfile(path: Path) -> Dockerfile:
    """Read and parse a Dockerfile.

    Raises:
        DockerfileError: the file cannot be read, is too large, or has an error.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT + 1)
        text = data.decode()
    except OSError as error:
        raise DockerfileError(f"cannot be read: {error.strerror}", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise DockerfileError("is not UTF-8", file=str(path)) from error
    if len(data) > FILE_LIMIT:
        raise DockerfileError(f"has more than {FILE_LIMIT} bytes", file=str(path))
    return parse_dockerfile(text, str(path))


def parse_dockerfile(text: str, file: str = "Dockerfile") -> Dockerfile:
    """Parse a Dockerfile.

    Args:
        file: its name for messages.

    Raises:
        DockerfileError: the text has an error, or an unsupported instruction.
    """
    if "\0" in text:
        raise DockerfileError("contains a zero byte", file=file)
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape, start = _directives(lines, file)
    parser = _Parser(lines, file, escape, start)
    instructions = tuple(parser.instructions())
    if not any(instruction.name == "FROM" for instruction in instructions):
        raise DockerfileError("has no FROM", file=file)
    return Dockerfile(file=file, instructions=instructions, escape=escape)


def _directives(lines: Sequence[str], file: str) -> tuple[str, int]:
    """Return the escape character and the number of lines with directives."""
    escape = "\\"
    seen: set[str] = set()
    for number, line in enumerate(lines):
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None or (name := found[1].lower()) not in _DIRECTIVES:
            return escape, number
        if name in seen:
            raise DockerfileError(f"the directive {name} is given twice", file=file, line=number + 1)
        seen.add(name)
        if name == "escape":
            escape = found[2]
            if escape not in ("\\", "`"):
                raise DockerfileError(
                    f"{escape!r} cannot be the escape character", file=file, line=number + 1
                )
    return escape, len(lines)


class _Parser:
    def __init__(self, lines: Sequence[str], file: str, escape: str, start: int) -> None:
        self._lines, self._file, self._escape, self._position = lines, file, escape, start
        self._continued = re.compile(rf"(?s:^|.*[^{re.escape(escape)}]){re.escape(escape)}[ \t]*")

    def instructions(self) -> Iterator[Instruction]:
        count = 0
        while self._position < len(self._lines):
            line = self._lines[self._position].strip()
            if not line or line.startswith("#"):
                self._position += 1
                continue
            count += 1
            if count > _INSTRUCTION_LIMIT:
                raise DockerfileError(f"has more than {_INSTRUCTION_LIMIT} instructions", file=self._file)
            yield self._instruction()

    def _instruction(self) -> Instruction:
        number = self._position + 1
        text = self._logical_line()
        word, rest = re.match(r"(\S+)\s*((?s:.*))", text).groups()  # type: ignore[union-attr]
        name = word.upper()
        if name not in INSTRUCTIONS:
            raise self._error(number, word, "unknown instruction", name_hint(name, INSTRUCTIONS))
        if name == "ONBUILD":
            raise self._error(
                number, name, "is not supported", "write its instruction in the image that uses it"
            )
        flags, rest = self._flags(number, name, rest)
        if not rest:
            raise self._error(number, name, "needs an argument")
        items = json_items(rest) if name in _JSON else None
        heredocs: tuple[Heredoc, ...] = ()
        if name in _HEREDOCS and "<<" in rest and items is None:
            words = _with_documents(split_words(rest, escape=self._escape))
            heredocs = tuple(self._heredocs(number, name, words))
            rest = rest if name == "RUN" else " ".join(words)
        return Instruction(line=number, name=name, flags=flags, text=rest, items=items, heredocs=heredocs)

    def _logical_line(self) -> str:
        """Return a line, joined with the lines that continue it."""
        parts: list[str] = []
        while self._position < len(self._lines):
            line = self._lines[self._position]
            self._position += 1
            if parts and (not line.strip() or line.lstrip().startswith("#")):
                continue  # comments and empty lines do not end a continued line
            if not self._continued.fullmatch(line):
                return "".join([*parts, line]).strip()
            parts.append(line.rstrip(" \t")[:-1])
        return "".join(parts).strip()

    def _flags(self, number: int, name: str, text: str) -> tuple[tuple[tuple[str, str], ...], str]:
        flags: list[tuple[str, str]] = []
        while text.startswith("--") and name in FLAGS:
            word = split_words(text, escape=self._escape)[0]
            text = text[len(word) :].lstrip()
            if word == "--":
                break
            flag, _, value = word[2:].partition("=")
            if flag not in FLAGS[name]:
                raise self._error(number, name, f"unknown flag --{flag}", name_hint(flag, FLAGS[name]))
            flags.append((flag, value))
        return tuple(flags), text

    def _heredocs(self, number: int, name: str, words: Sequence[str]) -> Iterator[Heredoc]:
        found = [match for word in words if (match := _HEREDOC.fullmatch(word)) is not None]
        if len(found) > _HEREDOC_LIMIT:
            raise self._error(number, name, f"has more than {_HEREDOC_LIMIT} documents")
        for match in found:
            lines: list[str] = []
            raw: list[str] = []
            while True:
                if self._position >= len(self._lines):
                    raise self._error(number, name, f"the document {match[3]} has no end")
                line = self._lines[self._position]
                self._position += 1
                raw.append(line)
                line = line.lstrip("\t") if match[1] else line
                if line == match[3]:
                    break
                lines.append(line)
            content = "".join(f"{line}\n" for line in lines)
            yield Heredoc(match[3], content, not match[2], "\n".join(raw))

    def _error(self, number: int, name: str, message: str, hint: str = "") -> DockerfileError:
        return DockerfileError(message, file=self._file, line=number, instruction=name, hint=hint)


def json_items(text: str) -> tuple[str, ...] | None:
    """Return the strings of a JSON list; None if the text is something else."""
    if not text.startswith("["):
        return None
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        return None
    return tuple(items)


def _with_documents(words: Sequence[str]) -> list[str]:
    """Join the words of `<< NAME` to one word."""
    joined: list[str] = []
    for word in words:
        if joined and _HEREDOC_START.fullmatch(joined[-1]):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def heredoc_name(word: str) -> str | None:
    """Return the delimiter of a document that a word of COPY, ADD or RUN mentions; None if it does not."""
    found = _HEREDOC.fullmatch(word)
    return None if found is None else found[3]
