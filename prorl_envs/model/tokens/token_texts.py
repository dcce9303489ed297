"""Text of single tokens, for display only. This text is never tokenised again."""

from collections.abc import Callable, Sequence

#: Replacement character of decoders for invalid bytes.
_BROKEN = "\ufffd"
#: Maximum tokens that are decoded together to find a character.
_MAX_JOINED = 8


def token_texts(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens form a character, the first has it, the others "".

    Args:
        decode: returns the text of token ids.
        ids: token ids.
    """
    known: dict[int, str] = {}
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        token = ids[start]
        if token not in known:
            known[token] = _token_text(decode, token)
        text, used = known[token], 1
        if _BROKEN in text:
            text, used = _character(decode, ids[start : start + _MAX_JOINED], text)
        texts += [text, *[""] * (used - 1)]
    return texts


def _token_text(decode: Callable[[Sequence[int]], str], token: int) -> str:
    """Return the text of a token. Decodes a repeated token, because some decoders drop a leading space."""
    return decode([token, token])[len(decode([token])) :]


def _character(
    decode: Callable[[Sequence[int]], str], following: Sequence[int], alone: str
) -> tuple[str, int]:
    """Return the text of the fewest first tokens that form whole characters, and their number; `alone` and 1
    if there are none."""
    for used in range(2, len(following) + 1):
        text = decode(following[:used])
        if _BROKEN not in text:
            return text, used
    return alone, 1
