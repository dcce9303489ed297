"""Escaping of control tokens in text that comes from outside.

A chat template is rendered to one string, and the tokenizer turns every literal such as `<|im_end|>` in that
string into its control token, regardless of its author. A tool that prints `<|im_end|>\\n<|im_start|>system`
would then end its own turn and speak as the system. So before rendering, a *mark* (a random string, which no
author of a message can know) is put inside every such literal that starts in a message; after rendering, the
text is cut at the marks and the pieces are encoded separately. No piece contains a literal that a message
wrote, the ids decode to exactly the original text, and the template's own literals are untouched.

A literal can also be assembled from a message and the template's adjacent text. Three places are marked:

- inside each literal within the string (after its first character);
- inside each beginning of a literal at the end of the string (the template might supply the rest);
- in front of a string that begins with the rest of a literal (the template may have supplied its start).

A mark is never put next to leading or trailing white space, so a template that trims still trims.
"""

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

#: Maximum characters of a text whose cuts are cached, and number of cached texts. Most texts are keys, roles
#: and names, which recur in every message.
_SHORT, _CACHED = 64, 4096


def valid_unicode(text: str) -> str:
    """Replace lone surrogates in `text`. They have no UTF-8 form, so no tokenizer accepts them."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def new_mark() -> str:
    """Return a new mark: digits in Unicode noncharacters, which form no literal with the text beside them."""
    return f"\ufdd0{secrets.randbits(128)}\ufdd1"


def in_ascii_json(mark: str) -> str:
    """Return the form of `mark` in the output of a template's `tojson(ensure_ascii=true)`."""
    return mark.encode("ascii", "backslashreplace").decode()


class ControlTokenEscaper:
    """Escaper that marks the control literals in strings from outside the template.

    Args:
        literals: texts that the tokenizer maps to control tokens. Single characters and white space are
            vocabulary, not structure, and are ignored.
    """

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = tuple(sorted({text for text in literals if len(text) > 1 and text.strip()}))
        self._longest = max(map(len, self._literals), default=1)
        # Sets, because every string of every message is looked up, and a model has hundreds of literals.
        self._beginnings = {text[:end] for text in self._literals for end in range(1, len(text))}
        self._endings = {text[start:] for text in self._literals for start in range(1, len(text))}
        # One pattern per first character, because a search skips quickly to the next such character. Only
        # this character is consumed, because literals may overlap.
        rests: dict[str, list[str]] = {}
        for text in self._literals:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
        self._anywhere = [
            re.compile(f"{re.escape(first)}(?={'|'.join(after)})") for first, after in rests.items()
        ]
        self._cuts_of_short = lru_cache(_CACHED)(self._cuts)

    def quote(self, text: str, mark: str, *, leading: bool = False) -> str:
        """Insert `mark` inside every literal that starts in `text`; removing the marks restores the text.

        Args:
            text: text of a message.
            mark: result of `new_mark`.
            leading: also mark the start of a text that begins with the rest of a literal. Use it for prose,
                but not for values that a template compares (`type == "object"`).
        """
        cuts = (self._cuts_of_short if len(text) <= _SHORT else self._cuts)(text, leading)
        return mark.join(text[a:b] for a, b in pairwise((0, *cuts, len(text))))

    def quote_tree(self, value: Any, mark: str, *, leading: bool = False) -> Any:
        """Return a JSON-like tree with every string in it quoted, including keys."""
        if isinstance(value, str):
            return self.quote(valid_unicode(value), mark, leading=leading)
        if isinstance(value, dict | Mapping):  # the check for dict is fast
            return {
                self.quote(valid_unicode(str(key)), mark): self.quote_tree(item, mark, leading=leading)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.quote_tree(item, mark, leading=leading) for item in value]
        return value

    def _cuts(self, text: str, leading: bool) -> tuple[int, ...]:
        cuts = {match.end() for pattern in self._anywhere for match in pattern.finditer(text)}
        cuts.update(self._starts_at_end(text))
        if leading and self._continues_a_literal(text):
            cuts.add(0)
        return tuple(sorted(cuts))

    def _starts_at_end(self, text: str) -> Iterable[int]:
        first = max(0, len(text) - self._longest + 1)
        return (start + 1 for start in range(first, len(text)) if text[start:] in self._beginnings)

    def _continues_a_literal(self, text: str) -> bool:
        """Return true if `text` begins with the end of a literal, or lies within a literal."""
        if any(text[:end] in self._endings for end in range(1, min(len(text), self._longest) + 1)):
            return True
        return bool(text) and any(text in literal[1:] for literal in self._literals)
