"""From the text a model sends to a waiting program to what is typed, piece by piece. Pure.

A piece at a time, and each only when the program waits again: what it does not read must not be left in the
terminal, where the shell would take it for a command.
"""

#: Bytes of the longest line a terminal hands over whole, with room for the line's end.
LINE_LIMIT = 4000

#: Names of keys, typed without an Enter. Control keys are `C-a` to `C-z`, and `C-[ C-\ C-] C-^ C-_`.
KEYS = {
    "ENTER": "\n",
    "TAB": "\t",
    "ESC": "\x1b",
    "BS": "\x7f",
    "UP": "\x1b[A",
    "DOWN": "\x1b[B",
    "RIGHT": "\x1b[C",
    "LEFT": "\x1b[D",
}


def names_key(text: str) -> bool:
    """Whether this is no command: the name of a key, or nothing."""
    return not text or _is_control(text) or text in KEYS


def _is_control(text: str) -> bool:
    return len(text) == 3 and text.startswith("C-") and "@" < text[2].upper() < "`"


def to_type(text: str) -> str:
    """A key's code where `text` is the name of one; else the text, with an Enter at its end; or nothing.

    Raises:
        ValueError: a line is longer than a terminal takes.
    """
    if _is_control(text):
        return chr(ord(text[2].upper()) & 0x1F)
    if text in KEYS:
        return KEYS[text]
    if any(len(line.encode()) > LINE_LIMIT for line in text.split("\n")):
        raise ValueError(f"a line of the input is longer than {LINE_LIMIT} bytes")
    return text if not text or text.endswith("\n") else text + "\n"


def next_piece(text: str, *, by_line: bool, first: bool) -> tuple[bytes, str]:
    """What to type next of `text`, and the rest.

    Args:
        by_line: whether the program gets whole lines. Else Enter is a key of its own, which sends what that
            key sends, and so is the first of all: many a program wants no more than that.
        first: whether nothing has been typed yet.
    """
    line, end, rest = text.partition("\n")
    if by_line:
        return (line + end).encode(), rest
    if not line:
        return b"\r", rest
    if first and not line.startswith("\x1b"):  # as one key's code may
        return line[0].encode(), line[1:] + end + rest
    return line.encode(), end + rest
