"""A file's text as the editing tools see it, and the way back to its bytes.

What an edit does not touch stays as it is, byte for byte: a byte order mark, bytes that are not UTF-8, line
endings, a missing newline at the end. What cannot be kept is refused.
"""

import codecs
from dataclasses import dataclass

from prorl_envs.tools.files import read_file

#: Bytes of the largest file that is viewed or edited.
FILE_LIMIT = 16 * 1024 * 1024
_BINARY_PROBE = 8192
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class EditError(Exception):
    """The command cannot be carried out; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Text:
    """The content of a text file.

    Args:
        content: without a byte order mark; bytes that are not UTF-8 are surrogates.
        marked: whether the file begins with a byte order mark.
    """

    content: str
    marked: bool = False

    @property
    def crlf(self) -> bool:
        """Whether every line ends with carriage return and line feed."""
        ends = self.content.count("\n")
        return ends > 0 and self.content.count("\r\n") == ends

    def fitted(self, text: str) -> str:
        """Text that a model wrote, with the line endings of this file.

        Raises:
            EditError: it has characters of which nobody knows how this file would spell them.
        """
        if not text.isascii() and not is_utf8(self.content):
            raise EditError(
                "The file is not UTF-8, so only ASCII text can be put into it; use the shell for the rest."
            )
        return text.replace("\r\n", "\n").replace("\n", "\r\n") if self.crlf else text

    def encode(self, content: str) -> bytes:
        """The bytes of this file once its content is `content`."""
        mark = codecs.BOM_UTF8 if self.marked else b""
        return mark + content.encode("utf-8", "surrogateescape")


def is_utf8(content: str) -> bool:
    """Whether a file with this content holds nothing but UTF-8."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(data: bytes) -> Text:
    """What a file with these bytes says."""
    body = data.removeprefix(codecs.BOM_UTF8)
    return Text(body.decode("utf-8", "surrogateescape"), marked=len(body) < len(data))


def load(path: str) -> Text:
    """Read a file.

    Raises:
        EditError: it is too large, or no text that could be edited.
        OSError: it cannot be read.
    """
    data, size = read_file(path, FILE_LIMIT)
    if size > FILE_LIMIT:
        raise EditError(f"{path} has {size} bytes, and the editor takes {FILE_LIMIT}; use the shell.")
    return checked(data, path)


def checked(data: bytes, path: str) -> Text:
    """What a file with these bytes says.

    Raises:
        EditError: it is no text that could be edited.
    """
    if data.startswith(_UTF_16):
        raise EditError(f"{path} is UTF-16, and the editor takes UTF-8; use the shell.")
    if b"\0" in data[:_BINARY_PROBE]:
        raise EditError(f"{path} is not a text file.")
    return decode(data)
