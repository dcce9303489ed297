"""Text encoder that splits at control tokens and caches the ids of short pieces, which templates repeat.

A tokenizer finds added tokens first, and encodes the text between two of them separately. So the pieces have
the same ids as the whole text, if splitting finds the same tokens. That holds for tokens that absorb no
adjacent space, and that do not overlap with any other token. `CachedEncoder` checks and tests each token.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer

#: Length in characters from which encoding takes milliseconds. It runs without the interpreter's lock, so a
#: thread can do it.
LONG = 8192
#: Pieces up to this length mostly come from a template; the ids of so many of them are cached.
_SHORT, _REMEMBERED = 32, 4096


class CachedEncoder:
    """Encoder that adds no special tokens.

    Args:
        tokenizer: the model's.
        at: texts of control tokens at which to split, if that preserves the ids.
    """

    def __init__(self, tokenizer: Tokenizer, at: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._of_short = lru_cache(_REMEMBERED)(lambda text: tuple(self._of(text)))
        added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        known = sorted({text for text in at if text in added})
        #: Texts at which it splits.
        self.at = [text for text in known if _stands_alone(text, added) and self._is_the_same(text)]
        self._cut = re.compile(f"({'|'.join(map(re.escape, self.at))})").split if self.at else _whole

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ids: list[int] = []
        for piece in self._cut(text):
            ids += self._of_short(piece) if len(piece) <= _SHORT else self._of(piece)
        return ids

    def _of(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _is_the_same(self, literal: str) -> bool:
        parts = ("some text", literal, "\nand more", literal, literal, " text\n", literal, "\n")
        return self._of("".join(parts)) == [number for part in parts for number in self._of(part)]


def _whole(text: str) -> list[str]:
    return [text]


def _stands_alone(literal: str, added: Mapping[str, AddedToken]) -> bool:
    """Return whether the tokenizer finds this token wherever its text occurs, and matches only its text."""
    token = added[literal]
    if token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    beginnings = tuple(literal[:end] for end in range(1, len(literal)))
    others = (other for other in added if other != literal)
    return not any(literal in other or other.endswith(beginnings) for other in others)
