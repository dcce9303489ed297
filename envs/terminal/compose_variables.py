"""Variables of Compose files: `${NAME}` in values, and files of variables.

Rules: https://docs.docker.com/reference/compose-file/interpolation/ and
https://docs.docker.com/compose/how-tos/environment-variables/variable-interpolation/
"""

import re
from collections.abc import Mapping

#: A reference after its `$`: `$` for a dollar sign, `NAME`, or the start of `{NAME}` and `{NAME:-WORD}`.
_REFERENCE = re.compile(
    r"\$|(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?P<operation>:?[-+?])?", re.ASCII
)
_NESTING = 10
_LINE = re.compile(r"(?:export\s+)?([^\s=#'\"]+)\s*(?:=\s*(.*))?", re.ASCII)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)\"""")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class MissingVariable(Exception):
    """A variable without a default has no value."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the variable {name} has no value")


def interpolated(text: str, variables: Mapping[str, str], *, depth: int = 0) -> str:
    """Return a text with its references replaced.

    Unlike in Compose, a missing variable without a default is not replaced by an empty text.

    Raises:
        MissingVariable: a variable without a default has no value.
        ValueError: a reference is malformed.
    """
    found: list[str] = []
    while "$" in text:
        before, _, text = text.partition("$")
        match = _REFERENCE.match(text)
        if match is None or depth > _NESTING:
            raise ValueError(f"not a reference to a variable: ${text[:50]} (write $$ for a dollar sign)")
        word, text = "", text[match.end() :]
        if match["name"]:
            end = _closing_brace(text)
            word, text = text[:end], text[end + 1 :]
        found += [before, _value(match, word, variables, depth)]
    return "".join([*found, text])


def _closing_brace(text: str) -> int:
    depth = 1
    for brace in re.finditer(r"\$\{|\}", text):
        depth += 1 if brace[0] == "${" else -1
        if not depth:
            return brace.start()
    raise ValueError("a brace is not closed")


def _value(match: re.Match[str], word: str, variables: Mapping[str, str], depth: int) -> str:
    name, operation = match["plain"] or match["name"], match["operation"] or ""
    if not name:
        return "$"
    if not operation and word:
        raise ValueError(f"not a reference to a variable: {name}{word[:50]}")
    # With a colon, an empty value counts as none.
    value = variables.get(name) or None if operation.startswith(":") else variables.get(name)
    match operation[-1:]:
        case "+":
            return "" if value is None else interpolated(word, variables, depth=depth + 1)
        case "-" if value is None:
            return interpolated(word, variables, depth=depth + 1)
    if value is None:
        raise MissingVariable(name)
    return value


def parsed_env_file(text: str, variables: Mapping[str, str], *, raw: bool = False) -> dict[str, str]:
    """Return the variables of a file with lines `NAME=VALUE`.

    Args:
        text: content of the file.
        variables: values for references. A line without `=` takes its value from here.
        raw: whether values are taken literally.

    Raises:
        MissingVariable: a variable without a default has no value.
        ValueError: a line is malformed.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number}: not NAME=VALUE")
        name, value = match.groups()
        known = {**found, **variables}
        if value is None:
            found |= {name: variables[name]} if name in variables else {}
        else:
            found[name] = value if raw else _unquoted(value, known, number)
    return found


def _unquoted(value: str, variables: Mapping[str, str], line: int) -> str:
    if value[:1] not in ("'", '"'):
        return interpolated(re.sub(r"(?:^|\s+)#.*", "", value), variables)
    match = _QUOTED.match(value)
    if match is None:
        raise ValueError(f"line {line}: the quote is not closed in this line")
    if match[1] is not None:
        return match[1]
    text = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), match[2])
    return interpolated(text, variables)
