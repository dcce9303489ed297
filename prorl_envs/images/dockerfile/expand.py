"""Words, quotes and variables of Dockerfiles (Dockerfile reference, "Environment replacement")."""

import re
from collections.abc import Callable, Mapping

from prorl_envs.errors import InputError

#: Most characters of an expanded text.
EXPANDED_LIMIT = 1 << 20
_NESTING_LIMIT = 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[*@#?!$-]")


class ExpansionError(InputError):
    """Error for a text with an incomplete quote or variable, or with too long a result."""


def expand(text: str, variables: Mapping[str, str], *, escape: str = "\\", keep_quotes: bool = False) -> str:
    """Replace the variables of a text, and remove its quotes and escapes.

    Args:
        variables: values by name; other variables expand to nothing.
        escape: the Dockerfile's escape character.
        keep_quotes: True keeps quotes, and expands variables even in single quotes: for documents.

    Raises:
        ExpansionError: a quote or a brace is not closed, `${x:?message}` fails, or the result is too long.
    """
    return _Expander(text, variables, escape, keep_quotes).text()


def split_words(text: str, *, escape: str = "\\") -> list[str]:
    """Split a text at white space outside quotes; keep quotes, escapes and variables. Never raises: the
    rest after an open quote is one word."""
    words, word, quote, index = [], "", "", 0
    while index < len(text):
        character = text[index]
        if character == escape and quote != "'" and index + 1 < len(text):
            word += text[index : index + 2]
            index += 2
            continue
        if character.isspace() and not quote:
            if word:
                words.append(word)
            word = ""
        else:
            word += character
            if quote == character:
                quote = ""
            elif not quote and character in "'\"":
                quote = character
        index += 1
    return [*words, word] if word else words


class _Expander:
    def __init__(
        self, text: str, variables: Mapping[str, str], escape: str, keep_quotes: bool, depth: int = 0
    ) -> None:
        if depth > _NESTING_LIMIT:
            raise ExpansionError("variables are nested too deeply")
        self._text, self._position = text, 0
        self._variables, self._escape = variables, escape
        self._keep_quotes, self._depth = keep_quotes, depth
        self._length = 0

    def text(self) -> str:
        parts: list[str] = []
        while self._position < len(self._text):
            parts.append(self._counted(self._next()))
        return "".join(parts)

    def _counted(self, part: str) -> str:
        self._length += len(part)
        if self._length > EXPANDED_LIMIT:
            raise ExpansionError(f"the text expands to more than {EXPANDED_LIMIT} characters")
        return part

    def _next(self) -> str:
        character = self._text[self._position]
        if not self._keep_quotes and character == "'":
            return self._single_quoted()
        if not self._keep_quotes and character == '"':
            return self._double_quoted()
        return self._plain()

    def _plain(self) -> str:
        character = self._take()
        if character == "$":
            return self._variable()
        if character != self._escape:
            return character
        if self._keep_quotes:
            if self._peek() in ("$", self._escape):
                return self._take()
            return character
        return self._take() if self._position < len(self._text) else ""

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._position + 1)
        if end < 0:
            raise ExpansionError("a single quote is not closed")
        quoted = self._text[self._position + 1 : end]
        self._position = end + 1
        return quoted

    def _double_quoted(self) -> str:
        self._position += 1
        parts: list[str] = []
        while self._position < len(self._text):
            character = self._take()
            if character == '"':
                return "".join(parts)
            if character == "$":
                parts.append(self._counted(self._variable()))
            elif character == self._escape and self._peek() in ('"', "$", self._escape):
                parts.append(self._take())
            else:
                parts.append(character)
        raise ExpansionError("a double quote is not closed")

    def _variable(self) -> str:
        if self._peek() == "{":
            self._position += 1
            return self._braced()
        found = _NAME.match(self._text, self._position)
        if found is None:
            return "$"
        self._position = found.end()
        return self._variables.get(found.group(), "")

    def _braced(self) -> str:
        found = _NAME.match(self._text, self._position)
        if found is None:
            raise ExpansionError("`${` without a name")
        self._position = found.end()
        end = self._closing_brace()
        operation, self._position = self._text[self._position : end], end + 1
        return self._modified(found.group(), operation)

    def _closing_brace(self) -> int:
        depth, position = 1, self._position
        while position < len(self._text):
            character = self._text[position]
            if character == self._escape:
                position += 1
            elif character == "}":
                depth -= 1
                if depth == 0:
                    return position
            elif self._text.startswith("${", position):
                depth += 1
            position += 1
        raise ExpansionError("`${` is not closed")

    def _modified(self, name: str, operation: str) -> str:
        value = self._variables.get(name)
        if not operation:
            return value or ""
        colon = operation.startswith(":")
        kind, word = operation[colon : colon + 1], operation[colon + 1 :]
        is_set = bool(value) if colon else value is not None
        match kind:
            case "-":
                return value or "" if is_set else self._nested(word)
            case "+":
                return self._nested(word) if is_set else ""
            case "?":
                if not is_set:
                    raise ExpansionError(f"the variable {name} is not set: {self._nested(word)}")
                return value or ""
            case "#" | "%" | "/" if not colon:
                return _cut(value or "", kind, word, self._nested)
        raise ExpansionError(f"`${{{name}{operation}}}` is not supported")

    def _nested(self, word: str) -> str:
        inner = _Expander(word, self._variables, self._escape, self._keep_quotes, self._depth + 1)
        return inner.text()

    def _take(self) -> str:
        self._position += 1
        return self._text[self._position - 1]

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]


def _cut(value: str, kind: str, word: str, nested: Callable[[str], str]) -> str:
    """Return a value without a prefix (`#`) or suffix (`%`) that matches, or with matches replaced (`/`)."""
    doubled = word.startswith(kind)  # `##` and `%%`: the longest match; `//`: all matches
    word = word[doubled:]
    if kind == "/":
        pattern, _, new = word.partition("/")
        expression = _glob(nested(pattern), greedy=True)
        replacement = nested(new)
        return re.sub(expression, lambda _: replacement, value, count=0 if doubled else 1)
    expression = _glob(nested(word), greedy=doubled)
    if kind == "#":
        return re.sub(rf"\A{expression}", "", value, count=1)
    starts = range(len(value) + 1) if doubled else range(len(value), -1, -1)
    return next(
        (value[:position] for position in starts if re.fullmatch(expression, value[position:])), value
    )


def _glob(pattern: str, *, greedy: bool) -> str:
    star = "(?s:.*)" if greedy else "(?s:.*?)"
    return "".join(star if c == "*" else "(?s:.)" if c == "?" else re.escape(c) for c in pattern)
