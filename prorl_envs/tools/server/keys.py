"""Conversion of a model's input for a waiting program to typed pieces. Pure.

Pieces are typed one at a time, each only when the program waits again: unread input must not remain in the
terminal, because the shell would run it as a command.
"""

#: Maximum bytes of a line that a terminal delivers as a whole, with room for the line's end.
LINE_LIMIT = 4000

#: Names of keys, typed without Enter. Control keys are `C-a` to `C-z`, and `C-[ C-\ C-] C-^ C-_`.
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
    """Return True if the text is empty or the name of a key, and so not a command."""
    return not text or _is_control(text) or text in KEYS


def _is_control(text: str) -> bool:
    return len(text) == 3 and text.startswith("C-") and "@" < text[2].upper() < "`"


def to_type(text: str) -> str:
    """Return the code of the key that `text` names, else the text with Enter appended; "" for "".

    Raises:
        ValueError: a line is longer than a terminal accepts.
    """
    if _is_control(text):
        return chr(ord(text[2].upper()) & 0x1F)
    if text in KEYS:
        return KEYS[text]
    if any(len(line.encode()) > LINE_LIMIT for line in text.split("\n")):
        raise ValueError(f"a line of the input is longer than {LINE_LIMIT} bytes")
    return text if not text or text.endswith("\n") else text + "\n"


def next_piece(text: str, *, by_line: bool, first: bool) -> tuple[bytes, str]:
    """Return the next piece of `text` to type, and the rest.

    Args:
        by_line: True if the program gets whole lines. Otherwise Enter is a separate piece, sent as the key's
            code, and so is the first character of the text: many programs read only a single key.
        first: True if nothing has been typed yet.
    """
    line, end, rest = text.partition("\n")
    if by_line:
        return (line + end).encode(), rest
    if not line:
        return b"\r", rest
    if first and not line.startswith("\x1b"):  # an escape sequence may be the code of one key
        return line[0].encode(), line[1:] + end + rest
    return line.encode(), end + rest
