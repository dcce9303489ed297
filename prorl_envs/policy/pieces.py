"""Text to ids, cut at control tokens: the pieces that a template writes around messages come again in each of
them, and are remembered.

A tokenizer looks for added tokens first, and whatever lies between two of them it encodes by itself. So the
pieces have the ids that the whole text has, where cutting finds the same tokens: which is so for those that
take no space from beside them, and that no other token can begin before, or hold. That is checked of each,
and tried.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer

#: Characters that take milliseconds to be made into tokens. That is done without the interpreter's lock, so
#: that a thread is the place for it.
LONG = 8192
#: Pieces so short are mostly a template's; their ids are remembered, for so many of them.
_SHORT, _REMEMBERED = 32, 4096


class Pieces:
    """Encodes text without adding anything.

    Args:
        tokenizer: the model's.
        at: texts of control tokens to cut at, where that is right.
    """

    def __init__(self, tokenizer: Tokenizer, at: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._of_short = lru_cache(_REMEMBERED)(lambda text: tuple(self._of(text)))
        added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        known = sorted({text for text in at if text in added}, key=len, reverse=True)
        #: The texts it cuts at.
        self.at = [text for text in known if _stands_alone(text, added) and self._is_the_same(text)]
        self._cut = re.compile(f"({'|'.join(map(re.escape, self.at))})").split if self.at else _whole

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
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
    """Whether the tokenizer finds this token wherever its text is, and nothing but its text."""
    token = added[literal]
    if token.lstrip or token.rstrip or token.single_word or token.normalized:
        return False
    beginnings = tuple(literal[:end] for end in range(1, len(literal)))
    others = (other for other in added if other != literal)
    return not any(literal in other or other.endswith(beginnings) for other in others)
