"""The text of single tokens, for people who look at them. Nothing is ever tokenised again from it."""

from collections.abc import Callable, Sequence

#: What decoders write where bytes are no character.
_BROKEN = "\ufffd"
#: Most tokens that one character is looked for in.
_TOGETHER = 8


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token. A character that several tokens make is the first one's; the others have "".

    Args:
        decode: text of token ids.
        ids: any.
    """
    known: dict[int, str] = {}
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        if ids[at] not in known:
            known[ids[at]] = _one(decode, ids[at])
        found, used = known[ids[at]], 1
        if _BROKEN in found:
            found, used = _character(decode, ids[at : at + _TOGETHER], found)
        texts += [found, *[""] * (used - 1)]
    return texts


def _one(decode: Callable[[Sequence[int]], str], token: int) -> str:
    """Said twice: decoders that drop the space in front of a text leave the second its own."""
    return decode([token, token])[len(decode([token])) :]


def _character(
    decode: Callable[[Sequence[int]], str], following: Sequence[int], alone: str
) -> tuple[str, int]:
    """The text of the fewest tokens from here that make whole characters, and how many they are."""
    for used in range(2, len(following) + 1):
        text = decode(following[:used])
        if _BROKEN not in text:
            return text, used
    return alone, 1
