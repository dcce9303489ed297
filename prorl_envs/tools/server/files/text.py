"""Text of a file for the editing tools, and its conversion back to bytes.

Text outside of an edit stays the same, byte for byte. This includes a byte order mark, bytes that are not
UTF-8, line endings, and a missing newline at the end. An edit that cannot preserve these is refused.
"""

import codecs
from dataclasses import dataclass

from prorl_envs.tools.protocol.tree import is_utf8
from prorl_envs.tools.server.files.whole_files import read_file

#: Maximum bytes of a file that can be viewed or edited.
FILE_LIMIT = 16 * 1024 * 1024
_BINARY_PROBE = 8192
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class EditError(Exception):
    """The command cannot be executed; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Text:
    """Content of a text file.

    Args:
        content: text without a byte order mark; bytes that are not UTF-8 are decoded to surrogates.
        marked: True if the file begins with a byte order mark.
    """

    content: str
    marked: bool = False

    @property
    def crlf(self) -> bool:
        """True if every line ends with carriage return and line feed."""
        ends = self.content.count("\n")
        return ends > 0 and self.content.count("\r\n") == ends

    def fitted(self, text: str) -> str:
        """Return a model's text with the line endings of this file.

        Raises:
            EditError: the text has characters whose encoding in this file is unknown.
        """
        if not text.isascii() and not is_utf8(self.content):
            raise EditError(
                "The file is not UTF-8, so only ASCII text can be put into it; use the shell for the rest."
            )
        return text.replace("\r\n", "\n").replace("\n", "\r\n") if self.crlf else text

    def encode(self, content: str) -> bytes:
        """Return the bytes of this file with the new content."""
        mark = codecs.BOM_UTF8 if self.marked else b""
        return mark + content.encode("utf-8", "surrogateescape")


def decode(data: bytes) -> Text:
    """Return the text of a file with these bytes."""
    body = data.removeprefix(codecs.BOM_UTF8)
    return Text(body.decode("utf-8", "surrogateescape"), marked=len(body) < len(data))


def load(path: str) -> Text:
    """Read a file.

    Raises:
        EditError: the file is too large, or not an editable text.
        OSError: the file cannot be read.
    """
    data, size = read_file(path, FILE_LIMIT)
    if size > FILE_LIMIT:
        raise EditError(f"{path} has {size} bytes, and the editor takes {FILE_LIMIT}; use the shell.")
    return checked(data, path)


def checked(data: bytes, path: str) -> Text:
    """Return the text of a file with these bytes.

    Raises:
        EditError: the file is not an editable text.
    """
    if data.startswith(_UTF_16):
        raise EditError(f"{path} is UTF-16, and the editor takes UTF-8; use the shell.")
    if b"\0" in data[:_BINARY_PROBE]:
        raise EditError(f"{path} is not a text file.")
    return decode(data)
