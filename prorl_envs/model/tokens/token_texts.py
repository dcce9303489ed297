"""Text of single tokens, for display only. This text is never tokenised again."""

from collections.abc import Callable, Sequence

#: Replacement character of decoders for invalid bytes.
_BROKEN = "\ufffd"
#: Most tokens in which one character is searched.
_TOGETHER = 8


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens form a character, the first has it, the others "".

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
    """Return the text of a token. Decodes a repeated token, because some decoders drop a leading space."""
    return decode([token, token])[len(decode([token])) :]


def _character(
    decode: Callable[[Sequence[int]], str], following: Sequence[int], alone: str
) -> tuple[str, int]:
    """Return the text of the fewest tokens from here that form whole characters, and their number."""
    for used in range(2, len(following) + 1):
        text = decode(following[:used])
        if _BROKEN not in text:
            return text, used
    return alone, 1
