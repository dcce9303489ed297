"""Extraction of a block of code from model output. Pure and bounded."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from prorl_envs.env.words import said

#: A fence of a code block. Its language is the first word after the marks, without braces and options.
_FENCE = re.compile(
    r"(?P<indent>[ \t]*(?P<item>(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)(?P<marks>`{3,}+(?!.*`)|~{3,}+)"
    r"(?P<info>[ \t]*[{.]*(?:(?P<language>[^\s{}:,=]++)(?!=))?.*)",
)
#: Maximum number of fences searched, from the end of a text: matching hostile fences takes quadratic time.
_FENCES = 2_000
_PYTHON = re.compile(r"i?python[0-9.]*|py3?|.*\.py")


def last_code(text: str) -> str:
    """Return the last fenced block marked as Python, else the last block without a language, else "".

    Fences are those of CommonMark (https://spec.commonmark.org/0.31.2/#fenced-code-blocks), at any
    indentation because of nested lists. Empty blocks and blocks that are not closed do not count.
    """
    lines = said(text).split("\n")
    fences = [fence for number, line in enumerate(lines) if (fence := _fence(number, line))][-_FENCES:]
    marked = unmarked = ""
    end = -1
    for opening_index, opening in enumerate(fences):
        if opening.line <= end or (closing := _closing(fences, opening_index)) is None:
            continue
        end, width = closing.line, opening.indent  # remove at most the indentation of the opening fence
        block = lines[opening.line + 1 : end]
        code = "".join(f"{line[:width].lstrip()}{line[width:]}\n" for line in block)
        if code.strip() and _PYTHON.fullmatch(opening.language):
            marked = code
        elif code.strip() and not opening.language:
            unmarked = code
    return marked or unmarked


class _Fence(NamedTuple):
    line: int
    indent: int
    marks: str
    info: str
    language: str
    item: bool

    def encloses(self, other: "_Fence") -> bool:
        """Return true if the other fence is too short, or of another kind, to close this fence's block."""
        return not other.marks.startswith(self.marks)


def _fence(line: int, text: str) -> _Fence | None:
    match = _FENCE.fullmatch(text)
    if match is None:
        return None
    indent, item, marks, info, language = match.group("indent", "item", "marks", "info", "language")
    return _Fence(line, len(indent), marks, info.strip(), (language or "").lower(), bool(item))


def _closing(fences: Sequence[_Fence], opening_index: int) -> _Fence | None:
    """Return the fence that closes the block of the opening fence; None if another block starts first.

    A fence that is indented further than the opening fence may be part of a docstring. It closes the block
    only if no other fence does.
    """
    opening, indented = fences[opening_index], None
    for number in range(opening_index + 1, len(fences)):
        fence = fences[number]
        if opening.encloses(fence):
            continue
        outside = fence.indent <= opening.indent
        if outside and (fence.info or fence.item):
            break
        if outside:
            return fence
        if not fence.info and not fence.item:
            indented = indented or fence
    return indented
