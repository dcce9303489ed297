"""Extraction of answers from model output: a box, a line `Answer: ...`, a block of code. Pure and bounded."""

import re

_THOUGHT_ENDS = "</think>"
_THOUGHT = "<think>"
_FENCE = "```"
_PYTHON = ("", "python", "python3", "py")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LINE = re.compile(r"^\W*(?:the |final )*answer\W*?(?: is)?\s*[:=]\s*(.+)$", re.IGNORECASE)
_LINES, _LINE_CHARS = 20, 500
#: Characters of a text that are searched, from its end.
MAX_CHARS = 200_000


def said(text: str) -> str:
    """Return the model's text after its reasoning; "" if the reasoning is not closed."""
    _, ended, rest = text[-MAX_CHARS:].rpartition(_THOUGHT_ENDS)
    if ended:
        return rest
    return "" if _THOUGHT in text else text[-MAX_CHARS:]


def last_code(text: str) -> str:
    """Return the last fenced block of Python, or of no named language; "" if there is none."""
    found, language = "", ""
    block: list[str] | None = None
    for line in said(text).splitlines(keepends=True):
        mark = line.strip()
        if block is None and mark.startswith(_FENCE):
            block, language = [], mark.removeprefix(_FENCE).strip().lower()
        elif block is not None and mark == _FENCE:
            found = "".join(block) if language in _PYTHON else found
            block = None
        elif block is not None:
            block.append(line)
    return found


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{...}` with balanced braces; "" if there is none."""
    spoken = said(text)
    boxes = [match.end() for match in _BOX.finditer(spoken)]
    return _braced(spoken, boxes[-1]) if boxes else ""


def stated(words: str) -> str:
    """Return the answer in a last message: its last boxed expression, or its last line `Answer: ...`."""
    if boxed := last_boxed(words):
        return boxed
    lines = [line for line in said(words).splitlines()[-_LINES:] if len(line) <= _LINE_CHARS]
    found = [match[1] for line in lines if (match := _LINE.match(line.strip()))]
    return found[-1] if found else ""


def bare(answer: str) -> str:
    """Strip the decoration of an answer: a box, dollar signs, a full stop."""
    text = _without_stop((last_boxed(answer) or answer).strip())
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
            text = text[len(left) : -len(right)].strip()
    return _without_stop(text)


def _without_stop(text: str) -> str:
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _braced(text: str, start: int) -> str:
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace does not count
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at].strip()
        at += 1
    return ""
