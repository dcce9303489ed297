"""Patterns of `.dockerignore` files, and of the sources of COPY and ADD."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from prorl_envs.errors import InputError

_PATTERN_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class _Rule:
    expression: re.Pattern[str]
    keeps: bool


class IgnoreRules:
    """Patterns that exclude paths; a later pattern with `!` includes them again.

    Args:
        lines: lines of the file.

    Raises:
        InputError: there are too many patterns.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules: list[_Rule] = []
        for line in lines:
            if rule := _rule(line):
                self._rules.append(rule)
            if len(self._rules) > _PATTERN_LIMIT:
                raise InputError(f"the ignore file has more than {_PATTERN_LIMIT} patterns")
        self.has_exceptions = any(rule.keeps for rule in self._rules)

    def excludes(self, path: str) -> bool:
        """Return True if a path, or a directory above it, is excluded.

        Args:
            path: path relative to the context.
        """
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        excluded = False
        for rule in self._rules:
            if rule.keeps is excluded and any(map(rule.expression.fullmatch, prefixes)):
                excluded = not rule.keeps
        return excluded


def _rule(line: str) -> _Rule | None:
    pattern = line.strip()
    if not pattern or line.startswith("#"):
        return None
    keeps = pattern.startswith("!")
    pattern = _clean(pattern.removeprefix("!").strip())
    return _Rule(glob_expression(pattern), keeps) if pattern else None


def _clean(pattern: str) -> str:
    parts: list[str] = []
    for part in pattern.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


def glob_expression(pattern: str) -> re.Pattern[str]:
    """Compile a pattern with `*`, `?`, `[...]`, `\\`, and `**` for any number of directories."""
    out, position = "", 0
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith("**/", position) and (position == 0 or pattern[position - 1] == "/"):
            out += "(?:[^/]+/)*"
            position += 3
            continue
        if pattern.startswith("**", position):
            out += "(?s:.*)"
            position += 2
            continue
        if character == "[" and (
            found := re.compile(r"\[(\^?)((?:\\.|[^\]\\])+)\]").match(pattern, position)
        ):
            out += f"[{found[1]}{found[2].replace('[', chr(92) + '[')}]"
            position = found.end()
            continue
        if character == "\\" and position + 1 < len(pattern):
            position += 1
            out += re.escape(pattern[position])
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character))
        position += 1
    try:
        return re.compile(out)
    except re.error as error:
        raise InputError(f"not a pattern: {pattern[:200]!r}") from error


def is_glob(name: str) -> bool:
    """Return True if a name has special characters of patterns that no `\\` escapes."""
    return any(character in re.sub(r"\\.", "", name) for character in "*?[")
